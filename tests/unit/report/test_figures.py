"""Figures return axes that hold what the report says."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hashnet.errors import ConfigError
from hashnet.report import figures
from hashnet.report.style import inline_svg, to_png, to_svg


@pytest.mark.parametrize(
    "name",
    ["precision_recall", "precision_at", "recall_at", "radius", "distances", "per_class"],
)
def test_a_report_draws_itself(reports, name):
    ax = getattr(reports[0], f"plot_{name}")()
    assert isinstance(ax, Axes)
    assert ax.get_xlabel()
    mine = Figure().add_subplot()
    assert getattr(reports[0], f"plot_{name}")(ax=mine) is mine


def test_curves_hold_the_numbers(reports):
    report = reports[0]
    line = report.plot_precision_recall().get_lines()[0]
    np.testing.assert_array_equal(line.get_xdata(), report.by_rank.recall)
    np.testing.assert_array_equal(line.get_ydata(), report.by_rank.precision)
    by_radius = report.plot_precision_recall(by="radius")
    assert "radius" in by_radius.get_xlabel()  # the two curves differ: the axis says which it is
    drawn = np.asarray(report.by_radius.empty) < 1
    np.testing.assert_array_equal(
        by_radius.get_lines()[0].get_ydata(), np.asarray(report.by_radius.precision)[drawn]
    )
    with pytest.raises(ConfigError, match="rank or radius"):
        report.plot_precision_recall(by="distance")


def test_many_methods_in_one_plot(reports):
    many = {f"method {i}": reports[i % 2] for i in range(14)}
    for draw in (figures.precision_recall, figures.precision_at, figures.recall_at):
        ax = draw(many)
        looks = {(line.get_color(), line.get_linestyle()) for line in ax.get_lines()}
        assert len(looks) == 14  # no two look the same
        assert len(ax.get_legend().get_texts()) == 14
    ax = figures.precision_over_bits({"a": reports, "b": reports[::-1]})
    assert ax.get_lines()[0].get_xdata().tolist() == [16, 32]
    assert ax.get_lines()[1].get_ydata().tolist() == [report.precision_within(2) for report in reports]


def test_one_class_a_bar_and_long_lists_are_cut(reports):
    ax = figures.per_class(reports[0])
    assert len(ax.patches) == 4
    assert len(figures.per_class(reports[0], most=2).patches) == 2


def test_histogram_has_a_square_root_scale():
    counts = [10] * 99 + [900]
    ax = figures.relaxed_histogram({"a": counts, "b": counts[::-1]})
    forward = ax.yaxis.get_transform().transform
    assert forward(np.array([0.25, 1.0])).tolist() == [0.5, 1.0]


def test_losses_mark_the_stages():
    from hashnet.training.history import History

    history = History()
    for step in range(90):
        history.add({"step": step, "stage": step // 30, "beta": 2.0 ** (step // 30), "J": 0.5, "L": None})
    ax = figures.losses(history)
    assert [text.get_text() for text in ax.texts] == ["β=1", "2", "4"]
    assert len(ax.get_legend().get_texts()) == 1  # L was never measured


def test_the_same_figure_is_the_same_file(reports):
    one, two = (to_svg(reports[0].plot_distances().figure) for _ in range(2))
    assert one == two
    assert to_png(reports[0].plot_distances().figure) == to_png(reports[0].plot_distances().figure)


def test_inline_svg_follows_the_page(reports):
    text = inline_svg(to_svg(reports[0].plot_radius().figure), "radius", "Within a radius")
    assert text.startswith("<svg")
    assert "var(--text)" in text
    assert "var(--font)" in text
    assert 'aria-label="Within a radius"' in text
    assert " width=" not in text[: text.index(">")]
    assert "#1b1b24" not in text
