"""Figures return axes that hold what the report says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hashnet.errors import ConfigError
from hashnet.reports import figures
from hashnet.reports.style import inline_svg, to_png, to_svg


@pytest.mark.parametrize(
    "name",
    ["precision_recall", "precision_at", "recall_at", "radius", "distances", "per_class"],
)
def test_a_figure_is_axes_of_its_own_or_given_ones(reports, name):
    drawn = {"16 bits": reports[0]} if name.startswith(("precision", "recall")) else reports[0]
    ax = getattr(figures, name)(drawn)
    assert isinstance(ax, Axes)
    assert ax.get_xlabel()
    mine = Figure().add_subplot()
    assert getattr(figures, name)(drawn, ax=mine) is mine


def test_curves_hold_the_numbers(reports):
    report = reports[0]
    line = figures.precision_recall({"16 bits": report}).get_lines()[0]
    np.testing.assert_array_equal(line.get_xdata(), report.by_rank.recall)
    np.testing.assert_array_equal(line.get_ydata(), report.by_rank.precision)
    by_radius = figures.precision_recall({"16 bits": report}, by="radius")
    assert "radius" in by_radius.get_xlabel()  # the two curves differ: the axis says which it is
    drawn = np.asarray(report.by_radius.empty) < 1
    np.testing.assert_array_equal(
        by_radius.get_lines()[0].get_ydata(), np.asarray(report.by_radius.precision)[drawn]
    )
    with pytest.raises(ConfigError, match="rank or radius"):
        figures.precision_recall({"16 bits": report}, by="distance")


def stairs(ax):
    """Label → what a drawn histogram holds."""
    return {patch.get_label(): patch.get_data() for patch in ax.patches if patch.get_label()}


def test_every_other_figure_holds_its_numbers(reports):
    report = reports[0]
    for name in ("precision", "recall"):
        line = getattr(figures, f"{name}_at")({"16 bits": report}).get_lines()[0]
        assert line.get_xdata().tolist() == list(range(1, 101))
        assert line.get_ydata().tolist() == list(getattr(report.by_rank, name))
    lines = figures.radius(report).get_lines()
    for line, name in zip(lines, ("precision", "recall", "empty"), strict=False):
        assert line.get_ydata().tolist() == list(getattr(report.by_radius, name))
    drawn = stairs(figures.distances(report))
    for label, counts in (("similar pairs", report.similar), ("dissimilar pairs", report.dissimilar)):
        assert drawn[label].values.tolist() == [count / sum(counts) for count in counts]
        assert drawn[label].edges.tolist() == [bit - 0.5 for bit in range(report.n_bits + 2)]
    counts = list(range(100))
    histogram = stairs(figures.relaxed_histogram({"a": counts}))["a"]
    assert histogram.values.tolist() == [count / 4950 for count in counts]
    np.testing.assert_allclose(histogram.edges, [place / 100 for place in range(101)])
    bars = figures.bit_balance([0.5, 0.0, 0.005]).patches
    assert [bar.get_height() for bar in bars] == [0.5, 0.0, 0.005]
    colours = [bar.get_facecolor() for bar in bars]
    assert colours[1] != colours[0] == colours[2]  # a dead bit stands out
    points = np.arange(12.0).reshape(6, 2)
    clouds = figures.embedding(points, ["cat", "dog", "cat", "dog", "cat", "bird"]).collections
    assert [cloud.get_label() for cloud in clouds] == ["cat", "dog", "bird"]
    assert clouds[0].get_offsets().tolist() == points[[0, 2, 4]].tolist()
    assert len({tuple(cloud.get_facecolor()[0]) for cloud in clouds}) == 3
    scores = {score.name: score.map for score in report.per_class}
    assert sorted(bar.get_width() for bar in figures.per_class(report).patches) == sorted(scores.values())


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
    from hashnet.training.checkpoints import History, StepRecord

    history = History()
    for step in range(90):
        stage = step // 30
        history.add(StepRecord(step, step, stage, beta=2.0**stage, J=1 / (step + 1)))
    ax = figures.losses(history)
    np.testing.assert_allclose(
        ax.get_lines()[0].get_ydata(), [1 / (step + 1) for step in range(90)], atol=1e-6
    )
    marks = [line.get_xdata()[0] for line in ax.get_lines() if line.get_linestyle() == ":"]
    assert marks == [30, 60]
    assert [text.get_text() for text in ax.texts] == ["β=1", "2", "4"]
    assert len(ax.get_legend().get_texts()) == 1  # L was never measured


def test_losses_by_one_loss_where_the_history_knows_them():
    from hashnet.training.checkpoints import History, StepRecord

    own, both = History(), History()
    for step in range(9):
        own.add(StepRecord(step, 0, 0, 1.0, J=0.5, L=0.6))
        both.add(StepRecord(step, 0, 0, 1.0, J=0.5, L=0.6, J_common=0.7, L_common=0.8))
    for history, common, expected in ((own, True, 0.6), (both, True, 0.8), (both, False, 0.6)):
        ax = figures.losses(history, common=common)
        assert ax.get_lines()[0].get_ydata()[0] == expected
        assert ("HashNet" in ax.get_ylabel()) == (expected == 0.8)


def test_names_with_dollars_are_drawn_as_they_are(reports):
    """Matplotlib takes text between two of them for a formula, and refuses this one."""
    score = dataclasses.replace(reports[0].per_class[0], name="$_$")
    report = dataclasses.replace(reports[0], per_class=(score, *reports[0].per_class[1:]))
    points = np.random.default_rng(0).normal(size=(4, 2))
    for ax in (
        figures.per_class(report),
        figures.embedding(points, ["$_$", "cat", "$_$", "cat"]),
        figures.precision_at({"$_$": report, "other": report}),
    ):
        assert "$_$" in to_svg(ax.figure)


def test_the_same_figure_is_the_same_file(reports):
    one, two = (to_svg(figures.distances(reports[0]).figure) for _ in range(2))
    assert one == two
    assert to_png(figures.distances(reports[0]).figure) == to_png(figures.distances(reports[0]).figure)


def test_inline_svg_follows_the_page(reports):
    text = inline_svg(to_svg(figures.radius(reports[0]).figure), "radius", "Within a radius")
    assert text.startswith("<svg")
    assert "var(--text)" in text
    assert "var(--font)" in text
    assert 'aria-label="Within a radius"' in text
    assert " width=" not in text[: text.index(">")]
    assert "#1b1b24" not in text
