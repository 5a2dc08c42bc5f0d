"""Sentences about a manifest, for the command line."""

from __future__ import annotations

from typing import Any

from hashnet.data.fetch import describe_bad, fetch_images
from hashnet.data.images import decode
from hashnet.data.manifest import Manifest
from hashnet.errors import BadImage

FIRST = 4  # pictures looked at when a manifest is made: enough to notice a wrong root folder


def describe_manifest(manifest: Manifest, summary: dict[str, Any]) -> str:
    """A few lines: rows, classes, splits, pairs."""
    what = "pictures" if manifest.modality == "image" else f"feature vectors of {manifest.n_features} values"
    classes = "no labels" if manifest.n_classes is None else f"{manifest.n_classes:,} classes"
    lines = [f"{manifest.uri}: {len(manifest):,} {what}, {classes}, {len(manifest.parts)} part(s)"]
    for name, entry in summary["splits"].items():
        line = f"  {name:<9}{entry['rows']:>12,} rows"
        if "classes" in entry:
            line += (
                f"  {entry['classes']:>6,} classes of {entry['smallest_class']:,} to "
                f"{entry['largest_class']:,} rows  {entry['labels_per_image']:.2f} labels per row"
            )
            if entry["labelled"] < entry["rows"]:
                line += f"  {entry['rows'] - entry['labelled']:,} without a label"
        lines.append(line)
    left_out = len(manifest) - _rows_in_a_split(manifest)
    if left_out:
        lines.append(f"  {left_out:,} rows are in no split")
    if pairs := summary.get("train_pairs"):
        ratio = pairs["dissimilar_per_similar"]
        shown = f", {ratio:.2f} dissimilar to 1 similar" if ratio is not None else ": nothing can be learnt"
        lines.append(f"  training pairs: {pairs['pairs']:,}, of them {pairs['similar']:,} similar{shown}")
    lines += [
        f"  {name.replace('_', ' ')}: {value:,}"
        for name, value in manifest.source.items()
        if _is_count(value)
    ]
    lines.append(f"  sha256 {manifest.sha256}")
    return "\n".join(lines)


def first_pictures(manifest: Manifest) -> str:
    """A sentence when none of the first pictures can be read (mostly a wrong folder), else nothing."""
    if manifest.modality != "image" or len(manifest) == 0:
        return ""
    found = check_pictures(manifest, FIRST)
    if found["bad"] < found["looked_at"]:
        return ""
    return f"{found['sentence']}. Is the folder of the pictures right (--root, --images)?"


def check_pictures(manifest: Manifest, n: int | None = None) -> dict[str, Any]:
    """Reads and decodes the first n pictures (all by default) and counts the bad ones by reason."""
    names: list[str] = []
    bad: list[BadImage] = []
    looked_at = 0
    columns = ["uri", "image"] if manifest.inline else ["uri"]
    for table in manifest.batches(columns=columns, rows=256, stop=n):
        for uri, picture in zip(table["uri"].to_pylist(), fetch_images(table), strict=True):
            looked_at += 1
            try:
                if isinstance(picture, BadImage):
                    raise picture
                decode(picture, at_least=64)
            except BadImage as error:
                names.append(str(uri))
                bad.append(error)
    reasons = {reason: sum(error.reason == reason for error in bad) for reason in {e.reason for e in bad}}
    about = {"looked_at": looked_at, "bad": len(bad), "reasons": reasons, "first": names[:5]}
    return about | ({"sentence": describe_bad(names, bad, looked_at)} if bad else {})


def _rows_in_a_split(manifest: Manifest) -> int:
    """Rows in at least one split: training rows outside the database are few, but must not count twice."""
    import pyarrow.compute as pc

    if manifest.count("database") + manifest.count("query") == len(manifest):
        return len(manifest)
    lengths = (pc.list_value_length(t["splits"]) for t in manifest.batches(columns=["splits"], rows=65_536))
    return sum(int(pc.sum(pc.greater(length, 0)).as_py() or 0) for length in lengths)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
