"""The client of a served index; its queries and the wire format, which the server uses without httpx."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.client import wire
    from hashnet.client.client import AsyncClient, Client
    from hashnet.client.wire import Queries

__all__, __getattr__ = lazy_names(__name__)
