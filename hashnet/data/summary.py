"""What a manifest holds: rows, classes and labels per split, the training pairs, unreadable pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from hashnet import labels as label_sets
from hashnet.data.fetch import describe_bad, fetch_images
from hashnet.data.images import decode
from hashnet.errors import BadImage
from hashnet.io import counted

if TYPE_CHECKING:
    from hashnet.data.manifest import Manifest

MAX_PATTERNS = 50_000  # different label sets up to which counting pairs takes seconds
FIRST = 4  # pictures checked when a manifest is made: enough to notice a wrong root folder


@dataclass(frozen=True)
class LabelCounts:
    """The labels of a split: labelled rows, classes that occur, labels per row, rows per class."""

    labelled: int
    classes: int
    labels_per_image: float
    largest_class: int
    smallest_class: int


@dataclass(frozen=True)
class SplitSummary:
    """Rows of a split, and their labels where the manifest has labels."""

    rows: int
    labels: LabelCounts | None


@dataclass(frozen=True)
class ManifestSummary:
    """Rows in all, per split and in no split; exact pair counts of the training set.

    ``train_pairs`` is None without labels, and where counting would take minutes.
    """

    rows: int
    splits: Mapping[str, SplitSummary]
    in_no_split: int
    train_pairs: label_sets.PairCounts | None

    def to_dict(self) -> dict[str, Any]:
        """As printed by ``hashnet dataset --json``, which adds the notes."""
        splits = {
            name: {"rows": split.rows} | (asdict(split.labels) if split.labels else {})
            for name, split in self.splits.items()
        }
        found: dict[str, Any] = {"rows": self.rows, "splits": splits}
        if self.train_pairs is not None:
            found["train_pairs"] = {
                "pairs": self.train_pairs.n_pairs,
                "similar": self.train_pairs.n_similar,
                "dissimilar_per_similar": self.train_pairs.ratio if self.train_pairs.n_similar else None,
            }
        return found

    def text(self, manifest: Manifest) -> str:
        """A few lines for a person: rows, classes, splits, pairs."""
        what = (
            "pictures" if manifest.modality == "image" else f"feature vectors of {manifest.n_features} values"
        )
        classes = "no labels" if manifest.n_classes is None else f"{manifest.n_classes:,} classes"
        lines = [f"{manifest.uri}: {self.rows:,} {what}, {classes}, {counted(len(manifest.parts), 'part')}"]
        lines += [_split_line(name, split) for name, split in self.splits.items()]
        if self.in_no_split:
            lines.append(f"  {self.in_no_split:,} rows are in no split")
        if pairs := self.train_pairs:
            shown = (
                f", {pairs.ratio:.2f} dissimilar pairs per similar pair"
                if pairs.n_similar
                else ": there is nothing to learn from"
            )
            lines.append(f"  training pairs: {pairs.n_pairs:,}, of them {pairs.n_similar:,} similar{shown}")
        lines += [f"  {name.replace('_', ' ')}: {n:,}" for name, n in notes(manifest).items()]
        return "\n".join([*lines, f"  sha256 {manifest.sha256}"])


def _split_line(name: str, split: SplitSummary) -> str:
    line = f"  {name:<9}{split.rows:>12,} rows"
    if (counts := split.labels) is not None:
        line += (
            f"  {counts.classes:>6,} classes of {counts.smallest_class:,} to {counts.largest_class:,} rows"
            f"  {counts.labels_per_image:.2f} labels per row"
        )
        if counts.labelled < split.rows:
            line += f"  {split.rows - counts.labelled:,} without a label"
    return line


def notes(manifest: Manifest) -> dict[str, int]:
    """What the sources counted: rows pruned, files skipped, rows that were there already."""
    found: Counter[str] = Counter()
    for source in (manifest.source, *manifest.source.get("appended", [])):
        found.update(
            {name: n for name, n in source.items() if isinstance(n, int) and not isinstance(n, bool)}
        )
    return dict(found)


def summarise(manifest: Manifest) -> ManifestSummary:
    """The summary of a manifest; it reads labels and splits, no picture."""
    splits = {
        name: SplitSummary(rows, _label_counts(manifest, name, rows))
        for name, rows in manifest.splits.items()
    }
    return ManifestSummary(len(manifest), splits, _in_no_split(manifest), _train_pairs(manifest))


def _train_pairs(manifest: Manifest) -> label_sets.PairCounts | None:
    labels = manifest.labels("train") if manifest.count("train") else None
    if labels is None:
        return None
    packed = label_sets.pack_labels(labels)
    patterns = len(np.unique(packed.view(f"V{packed.shape[1] * 8}").ravel()))
    return label_sets.count_pairs(labels) if patterns <= MAX_PATTERNS else None


def _label_counts(manifest: Manifest, split: str, rows: int) -> LabelCounts | None:
    if manifest.n_classes is None:
        return None
    per_class = np.zeros(manifest.n_classes, dtype=np.int64)
    labelled = 0
    for table in manifest.batches(split, columns=["labels"], rows=65_536):
        lists = table["labels"].combine_chunks()
        per_class += np.bincount(lists.flatten().to_numpy(), minlength=manifest.n_classes)
        labelled += int(np.count_nonzero(lists.value_lengths().fill_null(0).to_numpy()))
    return LabelCounts(
        labelled=labelled,
        classes=int(np.count_nonzero(per_class)),
        labels_per_image=float(per_class.sum() / max(rows, 1)),
        largest_class=int(per_class.max()),
        smallest_class=int(per_class.min()),
    )


def _in_no_split(manifest: Manifest) -> int:
    """Rows in no split; the counts alone do not tell, because a row may be in several splits."""
    if manifest.count("database") + manifest.count("query") == len(manifest):
        return 0
    lengths = (pc.list_value_length(t["splits"]) for t in manifest.batches(columns=["splits"], rows=65_536))
    return len(manifest) - sum(int(pc.sum(pc.greater(length, 0)).as_py() or 0) for length in lengths)


@dataclass(frozen=True)
class PictureCheck:
    """How many pictures were read and decoded, how many of them are bad, and which."""

    checked: int
    reasons: Mapping[str, int]
    names: tuple[str, ...]  # of the bad pictures
    sentence: str  # empty where none is bad

    @property
    def bad(self) -> int:
        return len(self.names)

    def to_dict(self) -> dict[str, Any]:
        """As printed by ``hashnet inspect --json``."""
        found = {
            "looked_at": self.checked,
            "bad": self.bad,
            "reasons": dict(self.reasons),
            "first": list(self.names[:5]),
        }
        return found | ({"sentence": self.sentence} if self.bad else {})


def check_pictures(manifest: Manifest, n: int | None = None) -> PictureCheck:
    """The result of reading and decoding the first ``n`` pictures (default: all)."""
    names: list[str] = []
    bad: list[BadImage] = []
    checked = 0
    columns = ["uri", "image"] if manifest.inline else ["uri"]
    for table in manifest.batches(columns=columns, rows=256, stop=n):
        for uri, picture in zip(table["uri"].to_pylist(), fetch_images(table), strict=True):
            checked += 1
            try:
                if isinstance(picture, BadImage):
                    raise picture
                decode(picture, at_least=64)
            except BadImage as error:
                names.append(str(uri))
                bad.append(error)
    reasons = Counter(error.reason for error in bad)
    return PictureCheck(checked, reasons, tuple(names), describe_bad(names, bad, checked) if bad else "")


def unreadable_warning(manifest: Manifest) -> str | None:
    """A sentence when none of the first pictures can be read (mostly a wrong folder), else None."""
    if manifest.modality != "image" or len(manifest) == 0:
        return None
    found = check_pictures(manifest, FIRST)
    if found.bad < found.checked:
        return None
    return f"{found.sentence}. Is the folder of the pictures right (--root, --images)?"
