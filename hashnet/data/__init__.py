"""Data: manifests, sources, protocols (train, query and database splits), pairs, and pictures as pixels."""

from hashnet.data.describe import check_pictures, describe_manifest, first_pictures
from hashnet.data.fetch import feature_matrix, feature_rows, fetch_images, too_many_bad
from hashnet.data.images import FORMATS, PREPROCESS_VERSION, Preprocess, decode
from hashnet.data.manifest import Manifest
from hashnet.data.pairs import COLUMNS, PairTable
from hashnet.data.parts import read_groups
from hashnet.data.protocols import Protocol
from hashnet.data.resplit import zero_shot_copy
from hashnet.data.sources import SOURCES, append_to, load_rows, make_manifest, source_module

__all__ = [
    "COLUMNS",
    "FORMATS",
    "PREPROCESS_VERSION",
    "SOURCES",
    "Manifest",
    "PairTable",
    "Preprocess",
    "Protocol",
    "append_to",
    "check_pictures",
    "decode",
    "describe_manifest",
    "feature_matrix",
    "feature_rows",
    "fetch_images",
    "first_pictures",
    "load_rows",
    "make_manifest",
    "read_groups",
    "source_module",
    "too_many_bad",
    "zero_shot_copy",
]
