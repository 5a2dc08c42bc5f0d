"""Encodes the database rows of a manifest into a code store, on all nodes of a Ray cluster."""

from cluster.encode.job import EncodeConfig, encode_database

__all__ = ["EncodeConfig", "encode_database"]
