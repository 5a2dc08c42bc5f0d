"""The pages of figures: every table is drawn from the rows of a benchmark, and each on one page."""

import re

import pytest

from tests.bench import run, tables

MADE = {"bench": "index", "machine": "a machine", "versions": {"faiss-cpu": "1.2.3"}}
ROWS = [
    MADE | {"case": "exact 64 bits, k = 10, batch 1", "rows": 50_000, "ratio": 2.5, "queries_per_s": 1234.5},
    MADE | {"case": "exact 512 bits, k = 10, batch 32", "batch": 32, "rows": 6_250, "over_numkong": 1.25},
    MADE
    | {"case": "filtered to 0.01%, 64 bits, k = 10, batch 1", "batch": 1, "ratio": 3.0}
    | {"rows": 50_000, "queries_per_s": 99.5},
    MADE | {"case": "memory, 50,000 codes of 64 bits, hashnet flat", "memory_mb": 3.4},
    MADE | {"case": "memory, 50,000 codes of 64 bits, qdrant-edge", "skipped": "not installed"},
    MADE | {"case": "2 slices of one core each, k = 10, batch 1", "queries_per_s": 249.0},
]


def test_a_row_becomes_a_line_of_its_page():
    peers, rest = tables.tables(ROWS, "peers"), tables.tables(ROWS, "performance")
    assert "Measured on a machine" in peers
    assert "Versions: faiss-cpu 1.2.3." in peers
    assert "**Exact search of 50,000 codes of 64 bits, the same ids as FAISS's**" in peers
    assert (
        "| × IndexBinaryFlat | case | queries/s |\n|---|---|---|\n| 2.5 | k = 10, batch 1 | 1,234 |" in peers
    )
    assert "| 1.25 | 512 | 6,250 | 32 |" in peers
    assert "| 3 | 0.01% | 1 | 99.5 |" in peers
    assert "| 50,000 codes of 64 bits, hashnet flat | 3.4 |" in peers
    assert "qdrant-edge |" not in peers
    assert "| k = 10, batch 1 | 249 |" in rest
    assert "Versions" not in rest
    assert "Exact search" not in rest


@pytest.mark.parametrize("page", ["peers", "performance"])
def test_the_documents_hold_what_the_views_draw(repo, page):
    """Titles and notes between the marks are those of this page's views."""
    text = (repo / "docs" / f"{page}.md").read_text()
    drawn = text.partition(run.BEGIN)[2].partition(run.END)[0]
    views = [view for view in tables.VIEWS if view.page == page]
    for title in re.findall(r"^\*\*(.*)\*\*$", drawn, re.M):
        of_title = [v for v in views if re.fullmatch(re.sub(r"\\{.*?\\}", ".*", re.escape(v.title)), title)]
        assert len(of_title) == 1, title
        assert of_title[0].note in drawn


def test_none_redraws_every_document_from_the_kept_rows(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    documents = [tmp_path / name for name in ("README.md", "docs/peers.md", "docs/performance.md")]
    for document in documents:
        document.write_text(f"before\n{run.BEGIN}\nold figures\n{run.END}\nafter\n")
    monkeypatch.setattr(run, "REPO", tmp_path)
    monkeypatch.setattr(run, "_machine", lambda: "a machine")  # it asks torch for GPUs
    monkeypatch.setattr(run, "_read", lambda: ROWS)
    monkeypatch.setattr("sys.argv", ["run.py", "none"])
    assert run.main() == 0
    for document in documents:
        text = document.read_text()
        assert text.startswith(f"before\n{run.BEGIN}\nMeasured on a machine")
        assert text.endswith(f"{run.END}\nafter\n")
        assert "old figures" not in text
