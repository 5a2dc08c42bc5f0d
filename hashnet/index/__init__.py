"""The search index: BinaryIndex over FAISS files, with an exact engine of its own."""

from hashnet.index.artefact import IndexArtefact
from hashnet.index.binary import BinaryIndex
from hashnet.index.build import Part, build_state, lineage_of, read_parts
from hashnet.index.kinds import KINDS, OPTIONS, parse_options
from hashnet.index.validation import check_ids, check_k, check_width

__all__ = [
    "KINDS",
    "OPTIONS",
    "BinaryIndex",
    "IndexArtefact",
    "Part",
    "build_state",
    "check_ids",
    "check_k",
    "check_width",
    "lineage_of",
    "parse_options",
    "read_parts",
]
