"""Manifests, the sources they are made from, splits, pairs, and pictures as pixels."""

from hashnet.data.features import feature_matrix, feature_rows
from hashnet.data.fetch import fetch_images, too_many_bad
from hashnet.data.images import FORMATS, PREPROCESS_VERSION, Preprocess, decode
from hashnet.data.manifest import Manifest, ManifestArtefact
from hashnet.data.pairs import PairTable
from hashnet.data.sources import SOURCES, append_source, load_source, make_manifest, source_options
from hashnet.data.splits import Protocol
from hashnet.data.summary import check_pictures, unreadable_warning
from hashnet.data.writer import zero_shot_copy

__all__ = [
    "FORMATS",
    "PREPROCESS_VERSION",
    "SOURCES",
    "Manifest",
    "ManifestArtefact",
    "PairTable",
    "Preprocess",
    "Protocol",
    "append_source",
    "check_pictures",
    "decode",
    "feature_matrix",
    "feature_rows",
    "fetch_images",
    "load_source",
    "make_manifest",
    "source_options",
    "too_many_bad",
    "unreadable_warning",
    "zero_shot_copy",
]
