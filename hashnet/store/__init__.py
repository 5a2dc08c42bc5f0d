"""The codes artefact: CodeStore, its plan and commit protocol, and the lookup of items."""

from hashnet.store.code_store import CodesArtefact, CodeStore, FeatureStore
from hashnet.store.codes_import import CodesOptions, import_codes
from hashnet.store.commit import ROWS_PER_SHARD, StoreWriter, write_store
from hashnet.store.lookup import ItemLookup, StoredItem
from hashnet.store.plan import (
    BIT_ORDER,
    PlannedPart,
    ShardRange,
    ShardRecord,
    StorePlan,
    check_plan,
    read_plan,
    read_quarantine,
    read_records,
    repair_range,
)

__all__ = [
    "BIT_ORDER",
    "ROWS_PER_SHARD",
    "CodeStore",
    "CodesArtefact",
    "CodesOptions",
    "FeatureStore",
    "ItemLookup",
    "PlannedPart",
    "ShardRange",
    "ShardRecord",
    "StorePlan",
    "StoreWriter",
    "StoredItem",
    "check_plan",
    "import_codes",
    "read_plan",
    "read_quarantine",
    "read_records",
    "repair_range",
    "write_store",
]
