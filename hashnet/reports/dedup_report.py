"""The page of near-duplicates: their number, their distances, and the largest clusters as pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hashnet.data import Manifest
from hashnet.dedup import Duplicates, DuplicatesInfo
from hashnet.io import counted, storage
from hashnet.reports.examples import thumbnails
from hashnet.reports.style import PALETTE, Card, Plot, new_axes, write_run_page
from hashnet.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLUSTERS, MEMBERS = 12, 11  # that the page shows, the largest first; the first member is the one kept
MATCHES = 24


@dataclass(frozen=True)
class Member:
    """One item on the page; ``note`` says what becomes of it."""

    row_id: int
    note: str
    kept: bool
    picture: str | None


@dataclass(frozen=True)
class ShownCluster:
    title: str
    members: tuple[Member, ...]
    more: int = 0  # that are not shown


def write_dedup_report(found: Duplicates, run: Run, base_uri: str | None = None) -> str:
    """Writes report.html and its figure beside the duplicates; returns the page's URI."""
    artefact = run.manifest
    manifest = artefact.open(verify=False) if artefact.exists() else None
    info = found.info
    crossed = info.n_against is not None
    return write_run_page(
        storage.join(found.uri, "report.html"),
        "dedup_page.html",
        _plots(info),
        [
            ("run", run.name),
            *((name, str(value)) for name, value in found.lineage.items() if value is not None),
        ],
        title=f"{'Leakage in' if crossed else 'Near-duplicates in'} {run.name}",
        subtitle=_subtitle(found),
        cards=_cards(found),
        warnings=_warnings(found),
        clusters=_matches(found, manifest, base_uri) if crossed else _clusters(found, manifest, base_uri),
        heading="The nearest matches" if crossed else "The largest clusters",
    )


def _plots(info: DuplicatesInfo) -> list[Plot]:
    """The distribution of distances, where there are pairs."""
    if not any(info.n_at):
        return []
    confirmed = "" if info.confirm is None else f" that {info.confirm} confirmed"
    note = f"Every pair within the radius{confirmed}: 0 are equal codes."
    return [Plot("distances", "Distances of the pairs", note, _distance_figure(info.n_at))]


def _subtitle(found: Duplicates) -> str:
    info = found.info
    others = "" if info.n_against is None else f" against {info.n_against:,} others"
    return f"{info.n_rows:,} items{others}, {info.n_bits}-bit codes, Hamming radius {info.radius}."


def _cards(found: Duplicates) -> list[Card]:
    info = found.info
    total = f"of {info.n_rows:,} items"
    share = f"{info.n_removed / max(info.n_rows, 1):.2%} {total}"
    note = f"within {counted(info.radius, 'bit')}, {info.n_at[0]:,} of them equal"
    if info.n_candidates is not None:
        note = f"of {info.n_candidates:,} within {counted(info.radius, 'bit')}, confirmed by {info.confirm}"
    meaning = f"Two items whose codes differ in at most {info.radius} of {info.n_bits} bits."
    cards = [Card("pairs", f"{sum(info.n_at):,}", note, meaning)]
    if info.n_against is not None:
        meaning = "Items here that are in a pair with one of the others."
        return [*cards, Card("items with a match", f"{info.n_near:,}", share, meaning)]
    stay = f"{info.n_rows - info.n_removed:,}"
    return [
        *cards,
        Card("clusters", f"{info.n_clusters:,}", f"of {info.n_near:,} items", "Items that pairs connect."),
        Card("would be removed", f"{info.n_removed:,}", share, "All items of a cluster but one."),
        Card("would stay", stay, f"one per cluster: {info.keep}", "Items in no pair, and one per cluster."),
    ]


def _warnings(found: Duplicates) -> list[str]:
    info = found.info
    warnings = [] if info.warning is None else [f"{info.warning}."]
    if info.complete_radius >= info.radius:
        return warnings
    return [
        *warnings,
        f"The files hold the {info.n_pairs:,} pairs within {info.complete_radius} bits; max_pairs cut the "
        "others. Clusters follow from all of them.",
    ]


def _distance_figure(n_at: tuple[int, ...]) -> Axes:
    ax = new_axes()
    ax.bar(np.arange(len(n_at)), n_at, color=PALETTE[0], width=0.8)
    ax.set(xlabel="Hamming distance", ylabel="pairs", xlim=(-0.6, len(n_at) - 0.4))
    ax.locator_params(axis="both", integer=True)
    ax.grid(axis="x", visible=False)
    return ax


def _clusters(found: Duplicates, manifest: Manifest | None, base_uri: str | None) -> list[ShownCluster]:
    table = found.clusters()
    ids, names = table["row_id"].to_numpy(), table["cluster"].to_numpy()
    sizes, kept = table["size"].to_numpy(), table["representative"].to_numpy()
    first = np.flatnonzero(np.diff(names, prepend=-1))  # the rows of a cluster lie together
    largest = first[np.argsort(-sizes[first], kind="stable")][:CLUSTERS]
    shown: list[tuple[str, list[int], int, int]] = []
    for start in largest.tolist():
        members = ids[start : start + sizes[start]]
        one = int(kept[start])
        rest = [int(i) for i in members[members != one][: MEMBERS - 1]]
        shown.append(
            (f"{sizes[start]:,} items, cluster {names[start]}", [one, *rest], one, int(sizes[start]))
        )
    wanted = {i for _, members, *_ in shown for i in members}
    pictures = thumbnails(manifest, wanted, base_uri) if manifest is not None else {}
    return [
        ShownCluster(
            title,
            tuple(Member(i, "stays" if i == one else "would go", i == one, pictures.get(i)) for i in members),
            size - len(members),
        )
        for title, members, one, size in shown
    ]


def _matches(found: Duplicates, manifest: Manifest | None, base_uri: str | None) -> list[ShownCluster]:
    """The nearest matches; the other store's pictures are shown where it is of the same manifest."""
    table = found.matches()
    order = np.lexsort((table["row_id"].to_numpy(), table["distance"].to_numpy()))[:MATCHES]
    rows = table.take(order).to_pylist()
    wanted = {row[name] for row in rows for name in ("row_id", "nearest")}
    pictures = thumbnails(manifest, wanted, base_uri) if manifest is not None else {}
    return [
        ShownCluster(
            f"distance {row['distance']}",
            (
                Member(row["row_id"], "here", False, pictures.get(row["row_id"])),
                Member(row["nearest"], "there", True, pictures.get(row["nearest"])),
            ),
        )
        for row in rows
    ]
