"""The pages of figures: every table is drawn from the rows of a benchmark, and each on one page."""

import re
from pathlib import Path

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
    MADE
    | {"bench": "encoding", "case": "one core and two, hashnet", "backbone": "alexnet"}
    | {"decode_1": 700.4, "decode_2": 1300.0, "whole_1": 110.0, "whole_2": 205.0},
    MADE
    | {"bench": "encoding", "case": "one core and two, Daft", "backbone": "alexnet"}
    | {"decode_1": 500.0, "decode_2": 900.0},
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
    assert "**Pictures of 500 × 375 per second on one core and on two, through alexnet**" in rest
    assert "| hashnet | 700 | 1,300 | 110 | 205 |\n| Daft | 500 | 900 | – | – |" in rest
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
    (tmp_path / "docs" / "serve.md").write_text(
        "× <!-- =exact -->9.9<!-- / -->, × <!-- =ivf -->1.2<!-- / -->"
    )
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
    # what was not measured this time stays
    text = (tmp_path / "docs" / "serve.md").read_text()
    assert text == "× <!-- =exact -->2.5<!-- / -->, × <!-- =ivf -->1.2<!-- / -->"


def test_a_figure_is_of_its_rows_alone(tmp_path):
    page = tmp_path / "page.md"
    mark = "<!-- ={} -->{}<!-- / -->".format
    names = ("qdrant-rescored", "qdrant", "served")
    page.write_text(" ".join(mark(name, "?") for name in names))
    rows = [
        MADE | {"case": "rescored 256 values, oversample 1, batch 1", "over_qdrant": 0.5},  # theirs / ours: 2
        MADE | {"case": "rescored 256 values, oversample 4, batch 1", "over_qdrant": 0.25},  # 4
        MADE | {"case": "rescored 256 values, oversample 4, batch 32", "over_qdrant": 0.1},  # another case
        {"bench": "serving", "case": "peer, one code", "server": "qdrant-edge"}
        | {"connections": 1, "requests_per_s": 7217.4},
        {"bench": "serving", "case": "peer, one code", "server": "qdrant-edge"}
        | {"connections": 16, "requests_per_s": 1.0},
        {"bench": "serving", "case": "json, one code", "server": "ray serve"}
        | {"connections": 1, "requests_per_s": 3.0},
    ]
    tables.put_figures(page, rows)
    drawn = zip(names, ("2 to 4", "7,217", "?"), strict=True)
    assert page.read_text() == " ".join(mark(*pair) for pair in drawn)
    page.write_text("<!-- =qdrnt -->1<!-- / -->")
    with pytest.raises(SystemExit, match="names the figure qdrnt"):
        tables.put_figures(page, rows)


def test_the_servers_become_a_line_each():
    rows = [
        {"bench": "serving", "case": "json, one code", "server": server, "connections": n}
        | {"requests_per_s": 1000.0 * n, "p50_ms": 0.5, "p99_ms": 20.0, "ratio_of_bare_app": 1.5}
        for server in tables.SERVERS
        for n in (1, 4)
    ]
    lines = tables.served(rows).splitlines()
    assert lines[0] == "| requests/s, p50, p99 | 1 connection | 4 connections |"
    assert lines[3] == "| `hashnet serve` | 1,000/s, 0.5 ms, 20 ms | 4,000/s, 0.5 ms, 20 ms |"
    assert lines[5] == "| `hashnet serve` / bare app | 1.5 | 1.5 |"
    assert tables.served([]) == ""


def test_the_figures_in_sentences_are_those_of_the_peers_tables(repo):
    """Read out of docs/peers.md by heading and column: README.md and docs/serve.md say the same."""
    found = _figures_in(repo / "README.md") | _figures_in(repo / "docs" / "serve.md")
    assert found.keys() == tables.FIGURES.keys()
    exact, long = _peers_table(repo, "Exact search of 1,"), _peers_table(repo, "Exact search of long codes")
    filtered, rescored = _peers_table(repo, "Search among"), _peers_table(repo, "The 10 nearest")
    kinds, clusters = _peers_table(repo, "Other kinds of index"), _peers_table(repo, "Clusters of near")
    ours, peers = _peers_table(repo, "Serving"), _peers_table(repo, "Peers of the server")
    single = {row["peer"]: row for row in peers if row["connections"] == "1"}
    arrow = [row for row in ours if row["requests"] == "arrow, 1024 codes"]

    def inverse(rows, column):
        return [f"{1 / float(row[column]):.3g}" for row in rows if row[column] != "–"]

    expected = {
        "exact": [row["× IndexBinaryFlat"] for row in exact],
        "exact-usearch": [row["× usearch"] for row in exact],
        "exact-long-single": [row["× IndexBinaryFlat"] for row in long if row["batch"] == "1"],
        "ivf": [row["× FAISS's IVF"] for row in kinds],
        "pgvector-filtered": inverse(filtered[:1], "× pgvector"),
        "qdrant-rescored": inverse(rescored, "× qdrant-edge"),
        "lance-clusters": [row["× Lance"] for row in clusters],
        "served": [ours[1]["requests/s"]],
        "pgvector": [single["pgvector"]["requests/s"]],
        "lancedb": [single["LanceDB flat"]["requests/s"]],
        "lancedb-ivf": [single["LanceDB IVF_FLAT"]["requests/s"]],
        "qdrant": [single["qdrant-edge"]["requests/s"]],
        "qdrant-recall": [single["qdrant-edge"]["recall"]],
        "arrow": [row["× the bare index"] for row in arrow if row["server"] == "hashnet serve"],
        "arrow-ray": [row["× the bare index"] for row in arrow if row["server"] == "ray serve"],
    }
    for name, texts in expected.items():
        values = sorted((float(text.replace(",", "")), text) for text in texts if text != "–")
        ends = list(dict.fromkeys((values[0][1], values[-1][1])))
        # pages show three digits, so what is made of them may differ in the last
        assert [float(end.replace(",", "")) for end in found[name].split(" to ")] == pytest.approx(
            [float(end.replace(",", "")) for end in ends], rel=0.005
        ), name
    table = (repo / "docs" / "serve.md").read_text()
    for row in ours[:9]:
        assert f"{row['requests/s']}/s, {row['p50 ms']} ms, {row['p99 ms']} ms" in table


def _figures_in(page: Path) -> dict[str, str]:
    return dict(re.findall(r"<!-- =([\w-]+) -->(.*?)<!-- / -->", page.read_text()))


def _peers_table(repo: Path, title: str) -> list[dict[str, str]]:
    """The rows of the table of docs/peers.md whose title begins so."""
    section = (repo / "docs" / "peers.md").read_text().partition(f"**{title}")[2].partition("\n**")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return [dict(zip(head, row, strict=True)) for row in rows]
