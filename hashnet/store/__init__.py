"""The codes artefact: CodeStore, its plan and commit protocol, and the lookup of items."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.store.code_store import CodesArtefact, CodeStore, FeatureStore
    from hashnet.store.codes_import import CodesOptions, import_codes
    from hashnet.store.commit import ROWS_PER_SHARD, StoreWriter, write_features, write_store
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
    from hashnet.store.vectors import METRICS, Vectors, check_vectors, read_vectors, write_vectors

__all__, __getattr__ = lazy_names(__name__)
