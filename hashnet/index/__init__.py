"""The search index: BinaryIndex over FAISS files, with an exact engine of its own."""

from hashnet.index.binary import BinaryIndex
from hashnet.index.build import Part, build_state, lineage_of, read_parts
from hashnet.index.files import ABOUT, FORMAT_VERSION, disk_seal, read_about, stored_bytes
from hashnet.index.kinds import KINDS, OPTIONS, parse_options
from hashnet.index.merge import merge, merge_hits
from hashnet.index.validation import check_ids, check_k, check_whole, check_width

__all__ = [
    "ABOUT",
    "FORMAT_VERSION",
    "KINDS",
    "OPTIONS",
    "BinaryIndex",
    "Part",
    "build_state",
    "check_ids",
    "check_k",
    "check_whole",
    "check_width",
    "disk_seal",
    "lineage_of",
    "merge",
    "merge_hits",
    "parse_options",
    "read_about",
    "read_parts",
    "stored_bytes",
]
