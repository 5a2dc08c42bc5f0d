"""Compiled loops: exact Hamming search, inverted lists, the counts of an evaluation; and their threads."""

from hashnet.kernels.bitslice import ITEMS, WORDS, aligned, block_planes, plan_queries, sum_planes
from hashnet.kernels.exact import merge_hits, merge_top_k, pad_columns, top_k, warm_up, within_radius
from hashnet.kernels.hamming import block_scratch
from hashnet.kernels.inverted_lists import InvertedLists, scan_lists
from hashnet.kernels.jit import compiled, popcount
from hashnet.kernels.ranking import HASH_BITS, scan, scratch_planes
from hashnet.kernels.threads import default_threads, run_all

__all__ = [
    "HASH_BITS",
    "ITEMS",
    "WORDS",
    "InvertedLists",
    "aligned",
    "block_planes",
    "block_scratch",
    "compiled",
    "default_threads",
    "merge_hits",
    "merge_top_k",
    "pad_columns",
    "plan_queries",
    "popcount",
    "run_all",
    "scan",
    "scan_lists",
    "scratch_planes",
    "sum_planes",
    "top_k",
    "warm_up",
    "within_radius",
]
