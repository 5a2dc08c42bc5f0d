"""The page of a run: everything inside, nothing outside, and it opens in a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import hashnet
from hashnet import CodeStore
from hashnet.errors import HashnetError
from hashnet.reports import examples, figures
from hashnet.reports.run_report import RunSources, reports_beside, write_run_report
from hashnet.run import Run

FIGURES = {
    "precision-recall", "precision-recall-radius", "precision-top-n", "recall-top-n", "radius", "distances",
    "per-class", "losses", "relaxed-histogram", "bit-balance", "tsne",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def few_points():
    """t-SNE of a hundred codes is as good a test as one of a thousand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "TSNE_ROWS", 100)
        yield


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    """The written report: (folder, text of the page, EvalReport)."""
    queries, store = CodeStore.open(str(run / "codes-query")), CodeStore.open(str(run / "codes"))
    report = hashnet.evaluate(
        queries.codes(), queries.labels(), store.codes(), store.labels(), k=50, database_ids=store.ids()
    )
    out = tmp_path_factory.mktemp("page") / "report"
    uri = write_run_report(json.loads(json.dumps(report.to_dict())), RunSources(Run(run)), str(out))
    assert uri == str(out / "report.html")
    return out, (out / "report.html").read_text(encoding="utf-8"), report


class Links(HTMLParser):
    """Everything a browser could fetch, every id, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.links, self.ids, self.tags = [], [], []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)


def test_nothing_is_fetched(page):
    found = Links()
    found.feed(page[1])
    assert found.links
    assert all(link.startswith(("data:", "#")) for link in found.links)
    assert "script" not in found.tags
    assert not re.search(r"@import|url\((?!#)", page[1])
    assert len(found.ids) == len(set(found.ids))


def test_every_figure_is_on_the_page_and_in_files(page):
    folder, text, _ = page
    for name in FIGURES:
        assert f'<figure id="{name}">' in text
        assert (folder / "figures" / f"{name}.svg").stat().st_size > 1000
        assert (folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_names_are_text_not_markup(page):
    assert "<script>alert" not in page[1]
    assert "&lt;script&gt;alert" in page[1]
    assert "bit 3 is dead" in page[1]


def test_every_definition_is_spelled_out(page):
    _, text, report = page
    for words in (
        "relevant items inside the top k",
        "at least one hit in the top k",
        "min(k, relevant items in the database)",
        "every order of items at equal distance",
        "the lower bound over tie orders",
        "a query with an empty ball counts 0",
        "precision of a random order",
        "percentile bootstrap",
        "Mean average precision: 1 when the relevant items among the first",
        "whose code differs from the query&#39;s in at most 2 bits",
    ):
        assert words in text
    assert f"{report.map:.4f}" in text
    assert f"{report.map_tie_aware:.4f}" in text


def test_examples_are_best_median_and_worst(run, page):
    _, text, report = page
    store, queries = CodeStore.open(str(run / "codes")), CodeStore.open(str(run / "codes-query"))
    manifest = hashnet.Manifest.open(str(run / "manifest.parquet"))
    shown = examples.gather(store, queries, report, examples.Pictures(manifest))
    assert [example.kind for example in shown] == ["best"] * 2 + ["median"] * 2 + ["worst"] * 2
    assert shown[0].score == f"AP {max(report.ap):.3f}"
    assert shown[-1].score == f"AP {min(report.ap):.3f}"
    codes, ids, labels = store.codes(), store.ids(), store.labels().argmax(axis=1)
    for example in shown:
        place = queries.ids().tolist().index(example.query.row_id)
        code, own = queries.codes()[place], queries.labels()[place].argmax()
        distances = [
            bin(int.from_bytes(code, "big") ^ int.from_bytes(other, "big")).count("1") for other in codes
        ]
        assert [item.distance for item in example.items] == sorted(distances)[:10]
        by_id = dict(zip(ids.tolist(), zip(distances, labels, strict=True), strict=True))
        for item in (example.query, *example.items):
            assert item.picture.startswith("data:image/")
        for item in example.items:
            assert by_id[item.row_id] == (item.distance, own) or not item.relevant
        assert example.precision == sum(item.relevant for item in example.items) / 10
    hits = sum(item.relevant for example in shown for item in example.items)
    assert (text.count('class="item hit'), text.count('class="item miss')) == (hits, 60 - hits)
    assert 0 < hits < 60
    for example in shown:
        assert f"row {example.query.row_id}: precision@10 {example.precision:.2f}" in text


def test_a_report_reads_only_what_it_shows(run, page, tmp_path, monkeypatch):
    """Not every row id, nor every code at once."""

    def refuse(*_):
        raise AssertionError("too much is read")

    real = CodeStore.codes
    monkeypatch.setattr(hashnet.Manifest, "row_ids", refuse)
    monkeypatch.setattr(CodeStore, "codes", lambda store: refuse() if store.n_rows == 210 else real(store))
    write_run_report(page[2].to_dict(), RunSources(Run(run)), str(tmp_path))
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page[1]
    assert (tmp_path / "figures" / "bit-balance.svg").read_bytes() == (
        page[0] / "figures" / "bit-balance.svg"
    ).read_bytes()


def test_a_row_that_the_manifest_lacks_has_no_picture(run):
    manifest = hashnet.Manifest.open(str(run / "manifest.parquet"))
    found = examples.thumbnails(manifest, {-1, 0, 239, 240})
    assert set(found) == {0, 239}
    assert all(picture.startswith("data:image/") for picture in found.values())


def test_few_queries_are_shown_once():
    assert examples.pick_queries([0.5]) == [("best", 0)]
    kinds = examples.pick_queries([0.1, 0.9, 0.5, 0.4])
    assert len({i for _, i in kinds}) == len(kinds) == 4


def test_of_queries_with_equal_ap_the_first_count_as_better():
    kinds = examples.pick_queries([0, 0, 0, 0, 1, 1, 1])  # best to worst: 4, 5, 6, 0, 1, 2, 3
    assert kinds == [("best", 4), ("best", 5), ("median", 6), ("median", 0), ("worst", 2), ("worst", 3)]


def test_a_run_of_features_without_history_still_has_a_page(reports, tmp_path):
    from hashnet.store import write_store

    rng = np.random.default_rng(0)
    report = reports[0]
    labels = rng.integers(0, 4, report.n_database)
    write_store(
        str(tmp_path / "codes"), rng.integers(0, 256, (report.n_database, 2), dtype=np.uint8), labels=labels
    )
    write_store(
        str(tmp_path / "codes-query"),
        rng.integers(0, 256, (report.n_queries, 2), dtype=np.uint8),
        labels=rng.integers(0, 4, report.n_queries),
    )
    reports[1].save(str(tmp_path / "other" / "report" / "report.json"))
    sources = RunSources(Run(tmp_path), beside=(str(tmp_path / "other"),))
    write_run_report(report.to_dict(), sources, str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert 'id="losses"' not in text
    assert 'id="precision-h2-bits"' in text  # two code lengths
    assert "item hit plain" in text or "item miss plain" in text


def test_other_data_does_not_stand_beside(reports, run, tmp_path):
    import dataclasses

    other = dataclasses.replace(reports[1], n_queries=7)
    other.save(str(tmp_path / "report" / "report.json"))
    with pytest.raises(HashnetError, match=r"7 queries.*30"):
        write_run_report(
            reports[0].to_dict(), RunSources(Run(run), beside=(str(tmp_path),)), str(tmp_path / "out")
        )


def test_a_run_of_the_same_code_length_is_left_out_beside(reports, tmp_path):
    for place, report in enumerate(reports[:2]):
        report.save(str(tmp_path / str(place) / "report" / "report.json"))
    assert reports_beside(reports[0], (str(tmp_path / "0"), str(tmp_path / "1"))) == [reports[1]]


def test_rows_for_the_embedding_have_one_label_and_are_balanced():
    labels = np.zeros((5000, 12), dtype=np.uint8)
    labels[np.arange(5000), np.arange(5000) % 12] = 1
    labels[:50, :2] = 1  # several labels: left out
    rows, classes = figures.tsne_rows(labels)
    assert len(rows) == 100
    assert np.bincount(classes).max() == 10
    assert (labels[rows].sum(axis=1) == 1).all()
    points = figures.tsne(np.zeros((12, 2), dtype=np.uint8))  # all codes equal
    assert points.shape == (12, 2)
    assert np.isfinite(points).all()


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_it_opens_in_a_browser(page, browser, width, scheme, tmp_path):
    folder, _, report = page
    said, asked = [], []
    with browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
        tab = context.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto((folder / "report.html").as_uri())
        tab.wait_for_load_state("load")
        assert tab.locator("figure svg").count() == len(FIGURES)
        for place in range(len(FIGURES)):
            box = tab.locator("figure svg").nth(place).bounding_box()
            assert box["width"] > 250
            assert box["height"] > 100
        assert tab.locator(".item img").count() == 66
        loaded = "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
        assert tab.evaluate(loaded)
        assert f"{report.map:.4f}" in tab.locator(".card").first.inner_text()
        for kind, strongest in (("hit", 1), ("miss", 0)):  # green and red frames
            style = f"getComputedStyle(document.querySelector('.item.{kind}'))"
            frame = [int(x) for x in re.findall(r"\d+", tab.evaluate(f"{style}.borderTopColor"))[:3]]
            assert frame[strongest] == max(frame) > min(frame) + 80
            assert tab.evaluate(f"{style}.borderTopWidth") == "3px"
        # nothing sticks out sideways, and text stands out from its background
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        colours = tab.evaluate(
            "[...document.querySelectorAll('figure svg text')].slice(0, 5).map(t => getComputedStyle(t).fill)"
            ".concat(getComputedStyle(document.querySelector('figure')).backgroundColor)"
        )
        light = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 765 for colour in colours]
        assert all(abs(text - light[-1]) > 0.5 for text in light[:-1])
        tab.screenshot(path=str(tmp_path / "page.png"), full_page=True)
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
