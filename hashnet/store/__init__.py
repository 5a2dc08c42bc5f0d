"""The codes artefact: CodeStore, its plan and commit protocol, and the lookup of items."""

from hashnet.store import commit, plan
from hashnet.store.artefact import CodesArtefact
from hashnet.store.code_store import ROWS_PER_SHARD, CodeStore, FeatureStore, write_store
from hashnet.store.commit import ShardRecord, commit_shard
from hashnet.store.lookup import ItemLookup, StoredItem
from hashnet.store.plan import BIT_ORDER, PlannedPart, ShardRange, StorePlan, read_plan, repair_range

__all__ = [
    "BIT_ORDER",
    "ROWS_PER_SHARD",
    "CodeStore",
    "CodesArtefact",
    "FeatureStore",
    "ItemLookup",
    "PlannedPart",
    "ShardRange",
    "ShardRecord",
    "StorePlan",
    "StoredItem",
    "commit",
    "commit_shard",
    "plan",
    "read_plan",
    "repair_range",
    "write_store",
]
