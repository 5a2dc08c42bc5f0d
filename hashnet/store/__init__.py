"""The codes artefact: CodeStore, its plan and commit protocol, and the lookup of items."""

from hashnet.store import commit, plan
from hashnet.store.code_store import ROWS_PER_SHARD, CodeStore, FeatureStore, write_store
from hashnet.store.commit import ShardRecord, commit_shard
from hashnet.store.lookup import Catalog
from hashnet.store.plan import BIT_ORDER, Part, Plan, ShardRange, mending_range, read_plan

__all__ = [
    "BIT_ORDER",
    "ROWS_PER_SHARD",
    "Catalog",
    "CodeStore",
    "FeatureStore",
    "Part",
    "Plan",
    "ShardRange",
    "ShardRecord",
    "commit",
    "commit_shard",
    "mending_range",
    "plan",
    "read_plan",
    "write_store",
]
