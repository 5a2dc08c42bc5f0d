"""What encoding reports, in this process or on actors: its plan with ``dry_run``, events, and its summary."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from hashnet.codes import dead_bits
from hashnet.data import too_many_bad
from hashnet.encoding import reasons_of
from hashnet.errors import LineageMismatch, TooManyBad
from hashnet.io import counted, duration, events, speed
from hashnet.models import BundleInfo
from hashnet.store import ShardRecord, StorePlan, StoreWriter, read_quarantine

log = logging.getLogger(__name__)


def describe(
    uri: str, plan: StorePlan, records: Mapping[str, ShardRecord], info: BundleInfo
) -> dict[str, Any]:
    """The plan: rows, shards done and to do, model, estimated size."""
    done = [records[shard.name] for shard in plan.ranges() if shard.name in records]
    done_rows = sum(record.stop - record.start for record in done)
    # Without any shard: the value, and about 24 bytes of row id, labels and uri after compression.
    per_row = plan.width / 8 + 24 if plan.output == "codes" else plan.width * 4 + 24
    if done_rows:
        per_row = sum(record.bytes for record in done) / done_rows
    result = {
        "dry_run": True,
        "out": uri,
        "rows": plan.n_rows,
        "rows_to_do": plan.n_rows - done_rows,
        "shards": plan.n_shards,
        "shards_done": len(done),
        "shards_to_do": plan.n_shards - len(done),
        "model_sha256": info.sha256,
        "backbone": info.backbone,
        "n_bits": info.n_bits,
        "engine": plan.lineage["engine"],
        "estimated_bytes": round(per_row * plan.n_rows),
    }
    log.info(
        f"plan: {plan.n_rows:,} {plan.split} rows → {uri}, {plan.n_shards:,} shards "
        f"({len(done):,} done, {plan.n_shards - len(done):,} to do), about {size(per_row * plan.n_rows)}\n"
        f"model: {info.backbone}, {info.n_bits} bits, sha256 {info.sha256[:12]}, "
        f"engine {plan.lineage['engine']}"
    )
    return result


def finish(
    uri: str, plan: StorePlan, max_bad_fraction: float, rows_now: int, seconds: float, workers: set[str]
) -> dict[str, Any]:
    """What the job prints about the store, which is made complete (header and _SUCCESS) unless it is already.

    TooManyBad if there are more bad rows than allowed; nothing is written then. A store that an earlier run
    completed, with fewer rows or a higher limit, stays usable as long as its shards are unchanged.
    """
    writer = StoreWriter(uri, plan)
    shards = writer.listed()
    reasons = unrepaired_reasons(uri, shards)
    bad, total = sum(reasons.values()), plan.n_rows
    if too_many_bad(bad, total, max_bad_fraction):
        writer.withdraw_stale(shards)
        listed = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items())
        raise TooManyBad(
            f"{bad:,} of {total:,} rows ({bad / total:.2%}) are bad, max_bad_fraction allows "
            f"{max_bad_fraction:.2%}: {listed}. The shards are kept, and "
            f"{writer.quarantine_uri} names the rows: repair them and run with "
            "only_failed=true, or raise max_bad_fraction"
        )
    header = writer.completed(shards) or writer.finish()
    result = {
        "out": uri,
        "output": plan.output,
        "rows": header["rows"],
        "bad_rows": bad,
        "bad_reasons": reasons,
        "rows_encoded_now": rows_now,
        "seconds": round(seconds, 3),
        "rows_per_s": round(rows_now / seconds, 1) if rows_now else None,
        "shards": len(shards),
        "bytes": sum(record.bytes for record in shards),
        **{name: plan.lineage[name] for name in ("engine", "dtype", "model_sha256")},
        "sha256": header["sha256"],
        "actors": len(workers),
        "nodes": len({worker.partition("/")[0] for worker in workers}),
    }
    if plan.output == "codes":
        result |= _code_statistics(plan.width, header["statistics"])
    log.info("%s", _text(result))
    return result


def _code_statistics(n_bits: int, statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Distinct codes, the share of ones per bit (min, mean, max) and the number of dead bits."""
    balance = statistics["bit_balance"]
    ones = {
        "min": min(balance),
        "mean": round(sum(balance) / len(balance), 6),
        "max": max(balance),
        "dead_bits": int(dead_bits(balance).sum()),
    }
    counts = {name: statistics[name] for name in ("distinct_codes", "distinct_is_exact")}
    return {"n_bits": n_bits, **counts, "bit_balance": ones}


def _text(result: Mapping[str, Any]) -> str:
    """The result in three lines."""
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in result["bad_reasons"].items())
    lines = [
        f"{counted(result['rows'], 'row')} in {counted(result['shards'], 'shard')}, {size(result['bytes'])}, "
        f"in {result['out']}; {counted(result['bad_rows'], 'bad row')}" + (f" ({reasons})" if reasons else "")
    ]
    if result["rows_per_s"] is None:
        lines.append("nothing to encode: every shard was there already")
    else:
        lines.append(
            f"encoded {result['rows_encoded_now']:,} now in {duration(result['seconds'])}: "
            f"{speed(result['rows_per_s'])} on {counted(result['actors'], 'actor')}, "
            f"{counted(result['nodes'], 'node')}, {result['engine']}"
        )
    if "bit_balance" in result:
        estimate, ones = "" if result["distinct_is_exact"] else "about ", result["bit_balance"]
        lines.append(
            f"{estimate}{result['distinct_codes']:,} distinct codes of {result['n_bits']} bits; ones per bit "
            f"{ones['min']:.2f}–{ones['max']:.2f}, {ones['dead_bits']} dead bits"
        )
    return "\n".join(lines)


def unrepaired_reasons(uri: str, shards: list[ShardRecord]) -> dict[str, int]:
    """Bad rows by reason, most frequent first; without those that were repaired."""
    if not any(record.repair for record in shards):
        return reasons_of(shards)
    left = read_quarantine(uri, {record.name: record for record in shards})
    return dict(sorted(Counter(left["reason"].to_pylist()).items(), key=lambda item: (-item[1], item[0])))


def size(n_bytes: float) -> str:
    """A number of bytes with a unit.

    >>> size(900), size(2_500_000)
    ('900 B', '2.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def report_commit(run: str, record: ShardRecord) -> None:
    """Writes the event of a committed shard."""
    events.event(
        "shard committed", run=run, stage="encode", shard=record.name, rows=record.rows, bad=record.bad_rows
    )


def report_bad_rows(run: str, decoded: pa.Table) -> None:
    """Writes the event of pictures that could not be decoded, if there are any."""
    reasons = bad_reasons(decoded)
    if reasons:
        shard = decoded["shard"][0].as_py()  # all rows of a decode task belong to one shard
        events.event("bad rows", run=run, stage="encode", shard=shard, reasons=reasons)


def bad_reasons(table: pa.Table) -> dict[str, int]:
    """The bad rows of a table, counted by reason."""
    counts = table["reason"].drop_null().value_counts().to_pylist()
    return {count["values"]: count["counts"] for count in counts}


def refuse_other_model(uri: str, sha256: str, planned: str) -> None:
    """LineageMismatch where the model is not the one that the plan of the store names."""
    if sha256 != planned:
        raise LineageMismatch(
            f"{uri} changed while encoding: it was {planned[:12]}, now it is {sha256[:12]}; run again"
        )
