"""Another protocol on the rows of a manifest that exists."""

from __future__ import annotations

import pyarrow as pa

from hashnet.data import splits
from hashnet.data.manifest import Manifest
from hashnet.data.protocols import Protocol, split
from hashnet.data.rows import SourceRows
from hashnet.data.writer import write_manifest
from hashnet.errors import DataError


def zero_shot_copy(manifest: Manifest, out: str, share: float, seed: int = 0) -> Manifest:
    """The same rows under the zero-shot protocol: training rows of seen classes, the others of unseen ones.

    Queries stay queries. Rows with both kinds of classes, and queries of seen ones, are in no set.
    """
    if manifest.n_classes is None:
        raise DataError(f"{manifest.uri} has no labels, which the zero-shot protocol needs")
    about = manifest.read(columns=["labels", "splits"])
    labels = about["labels"].combine_chunks()
    labels = labels if isinstance(labels, pa.Array) else pa.concat_arrays(labels.chunks)
    fixed = splits.from_lists(about["splits"])
    n = len(manifest)
    flags = split(Protocol(zero_shot=share, seed=seed), n, labels, manifest.n_classes, fixed=fixed)
    columns = [name for name in manifest.schema.names if name not in ("row_id", "labels", "splits")]

    def payload(start: int, stop: int) -> pa.Table:
        return manifest.read(columns=columns, start=start, stop=stop)

    rows = SourceRows(
        n=n,
        payload=payload,
        modality=manifest.modality,
        labels=labels,
        n_classes=manifest.n_classes,
        class_names=manifest.class_names,
        n_features=manifest.n_features,
        inline=manifest.inline,
        block_rows=4096,
    )
    of = {"of": manifest.source, "manifest_sha256": manifest.sha256}
    source = {"name": "zero_shot", "share": share, "seed": seed, **of}
    return write_manifest(out, rows, flags, source=source)
