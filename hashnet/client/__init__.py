"""Client and AsyncClient for a served index, and the wire format. Needs numpy, pyarrow and httpx only."""

from hashnet.client import wire
from hashnet.client.client import AsyncClient, Client
from hashnet.client.queries import Queries

__all__ = ["AsyncClient", "Client", "Queries", "wire"]
