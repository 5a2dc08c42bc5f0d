"""Data: manifests, sources, protocols (train, query and database splits), pairs, and pictures as pixels."""

from hashnet.data.manifest import Manifest

__all__ = ["Manifest"]
