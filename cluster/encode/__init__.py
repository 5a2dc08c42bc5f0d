"""Encode the database rows of a manifest into a code store, on all of a Ray cluster."""

from cluster.encode.job import ENGINES, EncodeConfig, encode_database

__all__ = ["ENGINES", "EncodeConfig", "encode_database"]
