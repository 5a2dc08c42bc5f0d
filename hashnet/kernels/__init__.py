"""Compiled loops: Hamming distances, top-k, inverted lists, histograms; and the threads they run on."""

from hashnet.kernels import hamming, inverted_lists
from hashnet.kernels.bitslice import ITEMS, WORDS, aligned, block_planes, plan_queries, sum_planes
from hashnet.kernels.jit import compiled, popcount
from hashnet.kernels.ranking import HASH_BITS, scan, scratch_planes
from hashnet.kernels.threads import default_threads, run_all

__all__ = [
    "HASH_BITS",
    "ITEMS",
    "WORDS",
    "aligned",
    "block_planes",
    "compiled",
    "default_threads",
    "hamming",
    "inverted_lists",
    "plan_queries",
    "popcount",
    "run_all",
    "scan",
    "scratch_planes",
    "sum_planes",
]
