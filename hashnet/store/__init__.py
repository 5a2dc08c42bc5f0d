"""The codes artefact: CodeStore, its plan and commit protocol, and the lookup of items."""

from hashnet.store.artefact import CodesArtefact
from hashnet.store.code_store import ROWS_PER_SHARD, CodeStore, FeatureStore, write_store
from hashnet.store.commit import ShardRecord, StoreWriter, read_quarantine, read_records
from hashnet.store.lookup import ItemLookup, StoredItem
from hashnet.store.plan import (
    BIT_ORDER,
    PlannedPart,
    ShardRange,
    StorePlan,
    check_plan,
    read_plan,
    repair_range,
)

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
    "StoreWriter",
    "StoredItem",
    "check_plan",
    "read_plan",
    "read_quarantine",
    "read_records",
    "repair_range",
    "write_store",
]
