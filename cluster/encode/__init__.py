"""Encodes the database rows of a manifest into a code store, on all nodes of a Ray cluster."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from cluster.encode.job import EncodeConfig, encode_database

__all__, __getattr__ = lazy_names(__name__)
