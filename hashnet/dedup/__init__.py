"""Exact near-duplicate detection in binary codes: pairs within a Hamming radius, clusters, what to remove.

near_duplicates(store, radius=2)     all pairs of a set, in memory
cross_duplicates(new, store)         the pairs between two sets
plan_tasks → BlockTask.run → finish  the same for stores of any size, in files: ``jobs/dedup.py``
"""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.dedup.artefact import (
        Duplicates,
        DuplicatesArtefact,
        DuplicatesInfo,
        finish,
        paired_ids,
        scores,
    )
    from hashnet.dedup.blocks import BlockRecord, BlockTask, plan_tasks, refuse_too_many
    from hashnet.dedup.confirm import SCORES, VECTORS, confirmation
    from hashnet.dedup.pairs import NearPairs, cross_duplicates, near_duplicates

__all__, __getattr__ = lazy_names(__name__)
