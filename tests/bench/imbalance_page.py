"""The page of the imbalance study: figures, the three effects with their intervals, all arms in a table."""

from __future__ import annotations

import base64
import html
import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from imbalance_study import Cell

SAMPLES, LEVEL = 2000, 0.95
IDEAS = {
    "adaptive": ("alpha 10/K instead of 1", "alpha"),
    "weighted": ("pair weights instead of none", "weights"),
    "continued": ("staged instead of plain", "staged"),
}
MEASURES: dict[str, tuple[str, Callable[[Any], np.ndarray]]] = {
    "map": ("MAP@1000", lambda cell: np.array(cell.ap)),
    "ball": ("P@H<=2", lambda cell: np.array(cell.in_ball)),
    "gap": ("J - L, absolute", lambda cell: np.array([abs(cell.j_common - cell.l_common)])),
}
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#1c2430}
h1{font-size:1.6rem;margin-bottom:.2rem} h2{font-size:1.15rem;margin-top:2rem} p.lead{color:#55606e}
table{border-collapse:collapse;font-size:13px;margin:.5rem 0} th,td{padding:.25rem .6rem;text-align:right;
border-bottom:1px solid #e3e7ec;white-space:nowrap} th:first-child,td:first-child{text-align:left}
td.up{color:#0b6e3f;font-weight:600} td.down{color:#b3261e;font-weight:600} img{max-width:100%}
"""


class Results:
    """Values by arm: arrays (seeds, queries) that a bootstrap draws seeds and queries of."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = {(c.imbalance, c.n_bits, c.arm, c.seed): c for c in cells}
        groups: dict[tuple[int, int], int] = {}
        for cell in cells:
            groups[cell.imbalance, cell.n_bits] = groups.get((cell.imbalance, cell.n_bits), 0) + 1
        self.seeds = sorted({cell.seed for cell in cells})
        self.arms = sorted(
            {cell.arm for cell in cells}, key=lambda arm: (arm.adaptive, arm.weighted, arm.continued)
        )
        self.settings = sorted(at for at, n in groups.items() if n == 8 * len(self.seeds))  # finished

    def values(self, measure: str, at: tuple[int, int], arm: Any) -> np.ndarray:
        """(seeds, queries), or (seeds, 1)."""
        return np.stack([MEASURES[measure][1](self.cells[(*at, arm, seed)]) for seed in self.seeds])

    def mean(self, measure: str, at: tuple[int, int], arm: Any) -> float:
        return float(self.values(measure, at, arm).mean())

    def effect(
        self, measure: str, at: tuple[int, int], idea: str, alone: bool = False
    ) -> tuple[float, float, float]:
        """(mean, low, high) of what an idea changes, averaged over the four arms with and without it; with
        ``alone`` in the arms that have both other ideas."""
        others = [name for name in IDEAS if name != idea]
        arms = [arm for arm in self.arms if not alone or all(getattr(arm, name) for name in others)]
        sign = {arm: 1 if getattr(arm, idea) else -1 for arm in arms}
        change = sum(sign[arm] * self.values(measure, at, arm) for arm in arms) / (len(arms) / 2)
        n_seeds, n_queries = change.shape
        rng = np.random.default_rng(0)
        # a seed's share of a resample, and a query's: the mean over both is a product of two matrices
        seeds = rng.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), SAMPLES) / n_seeds
        queries = rng.multinomial(n_queries, np.full(n_queries, 1 / n_queries), SAMPLES) / n_queries
        means = np.einsum("bs,sq,bq->b", seeds, change, queries, optimize=True)
        low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(change.mean()), float(low), float(high)


def write_page(folder: Path, cells: Sequence[Cell], total: int) -> Path:
    """Writes FOLDER/study.html and FOLDER/study.md; returns the page's path."""
    results = Results(cells)
    lengths = sorted({bits for _, bits in results.settings})
    effects, arms = ([table(results, bits) for bits in lengths] for table in (_effects, _arms))
    alone = [_effects(results, bits, alone=True) for bits in lengths]
    (folder / "study.md").write_text("\n".join(map(_markdown, effects + alone + arms)))
    longer = [cell.longer for cell in cells if cell.longer is not None]
    missing = f" <b>{len(cells)} of {total} trainings so far.</b>" if len(cells) < total else ""
    body = [
        "<h1>Alpha, pair weights, continuation: what each is worth</h1>",
        f"<p class=lead>{len(cells)} trainings of a linear hash layer on vectors of C balanced classes (C - "
        "1 dissimilar pairs per similar one), five seeds each; means over seeds and queries. Each arm at its "
        f"own best learning rate; twice the steps change MAP by {np.mean(longer):+.3f} on average "
        f"({min(longer):+.3f} to {max(longer):+.3f}).{missing}</p>",
        "<h2>In words</h2><ul>" + "".join(f"<li>{text}</li>" for text in _conclusions(results)) + "</ul>",
        _figure(results),
        "<h2>What each idea changes</h2><p>Mean of the four arms with it minus the four without; in brackets "
        "the 95 % interval of a bootstrap over queries and seeds. Green: better, red: worse, beyond "
        "chance.</p>",
        *map(_html, effects),
        "<h2>What each idea changes where the other two are there</h2><p>The paper's method minus the "
        "same without the idea.</p>",
        *map(_html, alone),
        "<h2>Every arm</h2><p>MAP@1000 / precision within Hamming radius 2 / absolute J - L: losses of the "
        "database rows at the arm's last beta, computed with alpha = 10/K and pair weights for all arms.</p>",
        *map(_html, arms),
    ]
    page = folder / "study.html"
    page.write_text(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Imbalance study</title>"
        f"<style>{STYLE}</style>{''.join(body)}</html>"
    )
    return page


def _conclusions(results: Results) -> list[str]:
    """One sentence per idea and measure: where it helps beyond chance, where it harms, by how much."""
    sentences = []
    for idea, (title, _) in IDEAS.items():
        for measure, (name, _) in MEASURES.items():
            better = -1 if measure == "gap" else 1
            sides: dict[str, list[str]] = {"better": [], "worse": [], "no different": []}
            for at in results.settings:
                mean, low, high = results.effect(measure, at, idea, alone=True)
                side = "no different" if low <= 0 <= high else "better" if better * mean > 0 else "worse"
                sides[side].append(f"{at[0]}:1 with {at[1]} bits ({mean:+.3f})")
            found = "; ".join(
                f"<i>{side}</i> at {', '.join(where)}" for side, where in sides.items() if where
            )
            sentences.append(f"<b>{html.escape(title)}</b>, {html.escape(name)}: {found}.")
    return sentences


def _effects(results: Results, n_bits: int, alone: bool = False) -> list[list[str]]:
    places = [at for at in results.settings if at[1] == n_bits]
    rows = [[f"{n_bits} bits", *(f"{r}:1" for r, _ in places)]]
    for idea, (title, _) in IDEAS.items():
        for measure, (name, _) in MEASURES.items():
            found = [results.effect(measure, at, idea, alone) for at in places]
            rows.append([f"{title}: {name}", *(f"{m:+.3f} [{a:+.3f}, {b:+.3f}]" for m, a, b in found)])
    return rows


def _arms(results: Results, n_bits: int) -> list[list[str]]:
    places = [at for at in results.settings if at[1] == n_bits]
    rows = [[f"{n_bits} bits", *(f"{r}:1" for r, _ in places)]]
    for arm in results.arms:
        figures = [[results.mean(measure, at, arm) for measure in MEASURES] for at in places]
        rows.append([arm.name, *(f"{m:.3f} / {p:.3f} / {gap:.3f}" for m, p, gap in figures)])
    return rows


def _markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]]) + "\n"


def _html(rows: list[list[str]]) -> str:
    def cell(row: list[str], text: str) -> str:
        kind = ""
        if "[" in text:
            low, high = (float(x) for x in text.partition("[")[2].rstrip("]").split(","))
            better = -1 if "J - L" in row[0] else 1
            if low > 0 or high < 0:
                kind = ' class="up"' if better * low > 0 else ' class="down"'
        return f"<td{kind}>{html.escape(text)}</td>"

    head = "".join(f"<th>{html.escape(text)}</th>" for text in rows[0])
    body = "".join("<tr>" + "".join(cell(row, text) for text in row) + "</tr>" for row in rows[1:])
    return f"<table><tr>{head}</tr>{body}</table>"


def _figure(results: Results) -> str:
    """One panel per measure and length: a line per arm over the imbalance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lengths = sorted({bits for _, bits in results.settings})
    if not lengths:
        return ""
    figure, axes = plt.subplots(
        len(MEASURES), len(lengths), figsize=(5.2 * len(lengths), 3.0 * len(MEASURES)), squeeze=False
    )
    colours = {
        (False, False): "#9aa5b1",
        (False, True): "#e08e0b",
        (True, False): "#3b82c4",
        (True, True): "#0b6e3f",
    }
    panels = itertools.product(enumerate(MEASURES.items()), range(len(lengths)))
    for (row, (measure, (title, _))), column in panels:
        ax = axes[row, column]
        places = sorted(r for r, bits in results.settings if bits == lengths[column])
        for arm in results.arms:
            ax.plot(
                range(len(places)),
                [results.mean(measure, (r, lengths[column]), arm) for r in places],
                color=colours[arm.adaptive, arm.weighted],
                linestyle="-" if arm.continued else "--",
                marker="o" if arm.continued else "s",
                markersize=4,
                label=arm.name,
            )
        ax.set_xticks(range(len(places)), [f"{r}:1" for r in places])
        ax.set_title(f"{title}, {lengths[column]} bits", fontsize=10)
        if measure == "gap":
            ax.set_yscale("log")
        ax.grid(alpha=0.25)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncol=2 * len(lengths), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    data = io.BytesIO()
    figure.savefig(data, dpi=110)
    plt.close(figure)
    text = base64.b64encode(data.getvalue()).decode()
    return f'<img alt="MAP, P@H&lt;=2 and J - L of every arm" src="data:image/png;base64,{text}">'
