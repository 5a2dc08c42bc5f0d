"""The codes artefact: what its folder is called inside, and its header ``manifest.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hashnet.codes import dead_bits
from hashnet.io import Artefact, Description, storage, wrong_files
from hashnet.store.plan import PLAN

RECORDS, QUARANTINE, SUCCESS = "_records", "_quarantine", "_SUCCESS"
ENOUGH_ROWS = 1_000  # below, a bit may be constant by chance
FEW_CODES = 0.01  # fewer different codes than this share of the rows: the codes have collapsed


class CodesArtefact(Artefact):
    """A store of codes (or features) as an artefact of a run."""

    header_file = "manifest.json"
    made_by = "encode the database with jobs/encode_db.py"

    def __init__(self, uri: str, kind: str | None = None) -> None:
        super().__init__(uri)
        self.kind = kind or self._begun_as()

    def _begun_as(self) -> str:
        """ "codes" or "features", whichever the folder's plan says; codes where it says nothing."""
        values = storage.read_json(storage.join(self.uri, PLAN)) if self.begun() else {}
        output = values.get("output") if isinstance(values, dict) else None
        return output if output in ("codes", "features") else "codes"

    def exists(self) -> bool:
        """Whether the store is complete: every shard committed and listed."""
        return storage.exists(storage.join(self.uri, SUCCESS))

    def begun(self) -> bool:
        """Whether encoding into this folder has begun, complete or not."""
        return storage.exists(storage.join(self.uri, PLAN))

    def open(self) -> Any:
        from hashnet.store.code_store import CodeStore, FeatureStore

        return (CodeStore if self.kind == "codes" else FeatureStore).open(self.uri)

    def write(self, codes: np.ndarray, **columns: Any) -> Any:
        from hashnet.store.code_store import write_store

        return write_store(self.uri, codes, **columns)

    def describe(self) -> Description:
        return super().describe() if self.exists() else Description(self.uri, self.kind)

    def verify(self) -> list[str]:
        if not self.exists():
            records = storage.list_names(storage.join(self.uri, RECORDS))
            done = sum(name.endswith(".json") for name in records)
            return [f"encoding is not finished: {done} shards are; run jobs/encode_db.py again to continue"]
        values = self.read()
        problems = list(wrong_files(self.uri, self.files(values)))
        return problems + health_problems(values["rows"], values.get("statistics") or {})

    def files(self, values: Mapping[str, Any]) -> dict[str, str]:
        shards = values["shards"]
        refused = [shard for shard in shards if shard.get("quarantine_sha256")]
        return {f"{shard['name']}.parquet": shard["sha256"] for shard in shards} | {
            f"{QUARANTINE}/{shard['name']}.parquet": shard["quarantine_sha256"] for shard in refused
        }

    def facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        facts = {name: values.get(name) for name in ("rows", "bad_rows", "n_classes", "sha256")}
        facts["n_bits" if values["kind"] == "codes" else "n_features"] = values["width"]
        facts["shards"] = len(values["shards"])
        statistics = values.get("statistics") or {}
        return facts | {name: value for name, value in statistics.items() if not isinstance(value, list)}


def health_problems(rows: int, statistics: Mapping[str, Any]) -> list[str]:
    """Dead bits and collapsed codes: the two ways in which codes are useless though nothing failed."""
    problems = []
    shares = statistics.get("bit_balance") or []
    if rows >= ENOUGH_ROWS and len(dead := np.flatnonzero(dead_bits(shares))):
        problems.append(
            f"{len(dead)} of {len(shares)} bits are the same in nearly all rows, the first is bit {dead[0]}"
        )
    distinct = statistics.get("distinct_codes")
    if distinct is not None and rows >= ENOUGH_ROWS and distinct < FEW_CODES * min(rows, 10_000):
        problems.append(f"only {distinct:,} different codes for {rows:,} rows: training has collapsed")
    return problems
