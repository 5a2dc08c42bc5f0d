"""The look of figures and pages: PNG, SVG that follows the page's theme, and the base of every HTML page.

The colours can be told apart by colour-blind readers, on light and on dark backgrounds.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hashnet import __version__
from hashnet.io import storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, LINE = "#1b1b24", "#5e5e6e", "#dcdce4"  # text, axes and ticks, grid; the page replaces them
PALETTE = (
    "#3d6fd6", "#e0702a", "#1f9d78", "#c2479a", "#b08900", "#3aa4c9", "#8a63d2", "#d6453d",
    "#6f8f2f", "#7a7a8c",
)  # fmt: skip
BAD = "#d6453d"
DASHES = ("-", "--", "-.", ":")  # tell series apart once the colours repeat

_RC: Any = {  # matplotlib's own type is a Literal of every key
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "svg.fonttype": "none",  # text stays text: readable, searchable, small
    "svg.hashsalt": "hashnet",  # the same figure is the same file
}


class Card(NamedTuple):
    """One of the numbers at the top of a page; ``meaning`` is its definition in one sentence."""

    name: str
    value: str
    note: str
    meaning: str


class Plot(NamedTuple):
    """A drawn figure of a page; ``name`` is that of its files."""

    name: str
    title: str
    note: str
    ax: Axes


class MetricRow(NamedTuple):
    """One line of the table of metrics; ``note`` is the interval, where there is one."""

    name: str
    value: str
    definition: str
    note: str = ""


def new_axes(ax: Axes | None = None, size: tuple[float, float] = (5.2, 3.6)) -> Axes:
    """``ax`` itself, or the axes of a new figure in this style, which no window shows."""
    return new_row(1, size)[1][0] if ax is None else ax


def new_row(columns: int, size: tuple[float, float] = (5.2, 3.8)) -> tuple[Figure, list[Axes]]:
    """A new figure in this style with axes side by side, each of that size."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    with matplotlib.rc_context(_RC):
        figure = NewFigure(figsize=(size[0] * columns, size[1]), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, [figure.add_subplot(1, columns, place + 1) for place in range(columns)]


def figure_of(ax: Axes) -> Figure:
    """The figure that axes belong to."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def line_style(place: int) -> dict[str, Any]:
    """Colour and dashes of the series at ``place``."""
    return {
        "color": PALETTE[place % len(PALETTE)],
        "linestyle": DASHES[place // len(PALETTE) % len(DASHES)],
    }


def legend(ax: Axes, **options: Any) -> None:
    """Adds a legend without a box; its text is not parsed as mathematics: a name may contain $."""
    for text in ax.legend(frameon=False, labelcolor=INK, **options).get_texts():
        text.set_parse_math(False)


def to_png(figure: Figure, dpi: int = 160) -> bytes:
    """The figure on a white background."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(_RC):
        figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def to_svg(figure: Figure) -> str:
    """The figure as an SVG document without a date, so that the same figure is the same text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(_RC):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def inline_svg(svg: str, name: str, title: str) -> str:
    """The SVG element alone, for an HTML page: ids of its own, the page's colours and font, an ARIA label."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', element)
    element = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", element)
    element = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', element)
    for colour, variable in ((INK, "--text"), (QUIET, "--quiet"), (LINE, "--line")):
        element = element.replace(colour, f"var({variable})")
    element = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", element)
    # var() works in style declarations, not in presentation attributes
    element = re.sub(r'\b(fill|stroke)="(var\([^"]+\))"', r'style="\1: \2"', element)
    opening = element[: element.index(">") + 1]
    scaled = re.sub(r'\s(width|height)="[^"]+"', "", opening)
    scaled = scaled.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return scaled + element[len(opening) :].replace("\n", " ")


def render(template: str, **values: Any) -> str:
    """The page's text: ``template`` (a file of this package) extends page.html; values are escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values)


def write_run_page(
    uri: str, template: str, plots: Iterable[Plot], made_from: Iterable[tuple[str, str]], **values: Any
) -> str:
    """Writes a page of one run to ``uri``, and its figures as SVG and PNG beside it; returns ``uri``."""
    drawn = []
    folder = storage.join(storage.parent_folder(uri), "figures")
    for plot in plots:
        figure = figure_of(plot.ax)
        svg = to_svg(figure)
        storage.write_bytes(storage.join(folder, f"{plot.name}.svg"), svg.encode())
        storage.write_bytes(storage.join(folder, f"{plot.name}.png"), to_png(figure))
        drawn.append((plot, inline_svg(svg, plot.name, plot.title)))
    made_from = [*made_from, ("hashnet", __version__)]
    page = render(template, figures=drawn, made_from_title="Made from", made_from=made_from, **values)
    storage.write_bytes(uri, page.encode())
    return uri


def interval_text(interval: tuple[float, float]) -> str:
    """How a page prints a 95 % interval."""
    return f"{interval[0]:.4f} – {interval[1]:.4f}"
