"""Compiled loops: exact search by distance and by score, inverted lists, counts, resampling; threads."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.kernels.asymmetric import merge_scores, score_codes, top_scores
    from hashnet.kernels.bitslice import ITEMS, bit_planes, plan_queries
    from hashnet.kernels.exact import merge_hits, merge_top_k, pad_columns, top_k, warm_up, within_radius
    from hashnet.kernels.hamming import block_scratch
    from hashnet.kernels.inverted_lists import InvertedLists, scan_lists
    from hashnet.kernels.jit import compiled, default_threads, memory_between, popcount, run_all
    from hashnet.kernels.ranking import (
        HASH_BITS,
        ClassItems,
        PlaneItems,
        Queries,
        count_and_rank,
        hash_bits,
        new_scratch,
    )
    from hashnet.kernels.resampling import resample
    from hashnet.kernels.vectors import DTYPES, damaged_row, score_rows

__all__, __getattr__ = lazy_names(__name__)
