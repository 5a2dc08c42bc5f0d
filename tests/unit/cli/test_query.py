"""``hashnet query --run``: pictures, features and ids against a run's folder; mistakes are one sentence."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from hashnet import BinaryIndex, Client
from hashnet.cli.entry import main
from hashnet.data.manifest import Manifest
from hashnet.server import ServeConfig, ServedRun
from hashnet.store import write_store
from tests.support.serving_app import BASE, make_app
from tests.support.small_run import make_run, some_codes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_run(tmp_path_factory.mktemp("query") / "run")


def test_a_picture_finds_itself(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = BinaryIndex.load(f"{run}/index")
    id_ = int(index.ids()[7])
    row = Manifest.open(f"{run}/manifest.parquet").read(columns=["image"], start=id_, stop=id_ + 1)
    picture = tmp_path / "digit.png"
    picture.write_bytes(row["image"][0].as_py())
    assert main(["query", str(picture), "--run", run, "-k", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    expected = index.search(index.codes([id_]), k=4)
    hits = answer["results"][0]["hits"]
    assert [hit["id"] for hit in hits] == expected.ids[0].tolist()
    assert [hit["distance"] for hit in hits] == expected.distances[0].tolist()
    assert answer["version"] == index.version
    own = next((hit for hit in hits if hit["id"] == id_), None)
    assert own is None or own["uri"] == f"digits/{id_:04d}.png"
    assert main(["query", str(picture), "--run", run]) == 0
    assert "10 hits" in capsys.readouterr().out


def test_ids_radius_and_labels(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    index = BinaryIndex.load(f"{run}/index")
    ids = index.ids()[:2].tolist()
    words = [
        "query",
        "--id",
        str(ids[0]),
        "--id",
        str(ids[1]),
        "--run",
        run,
        "--radius",
        "6",
        "--label",
        "3",
        "--json",
    ]
    assert main(words) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    expected = index.search_radius(index.codes(ids), radius=6, where={"labels": [3]})
    assert [[hit["id"] for hit in one["hits"]] for one in results] == [hit.ids.tolist() for hit in expected]
    assert {label for one in results for hit in one["hits"] for label in hit["labels"]} <= {"3"}


def test_keys_and_columns_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, codes = str(tmp_path / "run"), some_codes(30)
    keys = [f"sku {i}" for i in range(30)]
    index = BinaryIndex.from_arrays(codes, columns={"year": list(range(1990, 2020))}, keys=keys)
    index.save(f"{run}/index")
    nearest = index.search(codes[7:8], k=3).ids[0].tolist()
    words = ["query", "--key", "sku 7", "--run", run, "-k", "3"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sku 7: 3 hits"
    assert lines[1].split() == ["rank", "bits", "id", "labels", "key/uri"]
    assert [line.split("-")[-1].strip() for line in lines[2:]] == [keys[i] for i in nearest]
    starts = [lines[1].index(name) for name in ("labels", "key/uri")]
    assert [lines[2][start : start + 5] for start in starts] == ["-    ", "sku 7"]
    assert main([*words, "--columns", "year", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert [hit["key"] for hit in result["hits"]] == [keys[i] for i in nearest]
    assert [hit["columns"] for hit in result["hits"]] == [{"year": 1990 + i} for i in nearest]
    assert main([*words[:-2], "--radius", "0", "--columns", "year"]) == 0
    assert "sku 7  year=1997" in capsys.readouterr().out
    for wrong, sentence in (
        (["--key", "sku 99"], "no key 'sku 99'"),
        (["--key", "a", "--id", "1"], "one of them"),
        (["x.npy", "--exclude-self"], "--exclude-self is for --id and --key"),
    ):
        assert main(["query", *wrong, "--run", run]) == 2
        assert sentence in capsys.readouterr().err


def test_an_item_is_left_out_of_its_own_hits(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    index = BinaryIndex.load(f"{run}/index")
    id_ = int(index.ids()[5])
    nearest = index.search(index.codes([id_]), k=40).ids[0].tolist()
    others = [other for other in nearest if other != id_][:4]
    assert id_ in nearest
    words = ["query", "--id", str(id_), "--run", run, "--exclude-self", "--json"]
    for bound in (["-k", "4"], ["--radius", "64"]):
        assert main([*words, *bound]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        assert [hit["id"] for hit in result["hits"]][:4] == others
        assert id_ not in [hit["id"] for hit in result["hits"]]


def test_a_radius_without_hits_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BinaryIndex.from_arrays(np.array([[0, 0], [255, 255]], np.uint8)).save(f"{tmp_path}/index")
    np.save(tmp_path / "code.npy", np.array([[15, 0]], np.uint8))  # 4 bits from one, 12 from the other
    words = ["query", str(tmp_path / "code.npy"), "--run", str(tmp_path), "--radius"]
    assert main([*words, "3"]) == 0
    assert "0 hits; nothing is that near, try a larger --radius\n" in capsys.readouterr().out
    assert main([*words, "4"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["1", "4", "0", "-", "-"]


def test_codes_need_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, codes = str(tmp_path / "run"), some_codes(30)
    BinaryIndex.build(write_store(f"{run}/codes", codes)).save(f"{run}/index")
    np.save(tmp_path / "codes.npy", codes[4:6])
    np.save(tmp_path / "wide.npy", np.zeros((1, 16), np.uint8))
    np.save(tmp_path / "vectors.npy", np.zeros((1, 8), np.float32))
    assert main(["query", str(tmp_path / "codes.npy"), "--run", run, "-k", "1", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [[(hit["id"], hit["distance"]) for hit in one["hits"]] for one in results] == [[(4, 0)], [(5, 0)]]
    for words, sentence in (
        (["vectors.npy"], "run has codes without a model; search with codes (.npy), --id or --key"),
        (["wide.npy"], "128"),
        (["codes.npy", "--rescore"], "--rescore needs vectors of the queries, which codes lack"),
        (["codes.npy", "--ranking", "asymmetric"], "needs logits of the queries, which codes lack"),
    ):
        assert main(["query", str(tmp_path / words[0]), *words[1:], "--run", run]) == 2
        assert sentence in capsys.readouterr().err


def test_codes_keys_and_names_through_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, codes, keys = str(tmp_path / "run"), some_codes(30), pa.table({"key": [f"k{i}" for i in range(30)]})
    labels = np.arange(30) % 2
    names = ["cat", "dog"]
    store = write_store(f"{run}/codes", codes, labels=labels, n_classes=2, class_names=names, columns=keys)
    BinaryIndex.build(store).save(f"{run}/index")
    np.save(tmp_path / "codes.npy", codes[4:6])
    (tmp_path / "cat.jpg").write_bytes(b"picture")
    app = make_app(ServedRun.open(ServeConfig(run=run)), None)
    with TestClient(app, base_url=BASE) as http:

        def connect(client: Client, transport: object) -> None:
            http.headers.update(client._http_options()["headers"])
            client._http = http

        monkeypatch.setattr(Client, "_connect", connect)

        def found(*words: str) -> list[list[int]]:
            assert main(["query", *words, "--url", BASE, "--json"]) == 0
            results = json.loads(capsys.readouterr().out)["results"]
            return [[hit["id"] for hit in one["hits"]] for one in results]

        assert found(str(tmp_path / "codes.npy"), "-k", "1") == [[4], [5]]
        dogs = found("--key", "k3", "-k", "30", "--where", "labels = 'dog'", "--exclude-self")
        assert sorted(dogs[0]) == [i for i in range(1, 30, 2) if i != 3]
        assert main(["query", str(tmp_path / "cat.jpg"), "--url", BASE]) == 2
        assert "it has no model to encode them with" in capsys.readouterr().err


def test_codes_beside_a_model_of_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of uint8 that are as wide as a code are codes, others features."""
    run = make_run(tmp_path / "run", modality="features")
    index = BinaryIndex.load(f"{run}/index")
    np.save(tmp_path / "codes.npy", index.codes(index.ids()[:2]))
    rows = np.random.default_rng(0).integers(0, 17, (1, 64), dtype=np.uint8)  # digits of 8 x 8 pixels
    np.save(tmp_path / "bytes.npy", rows)
    np.save(tmp_path / "floats.npy", rows.astype(np.float32))
    found = {}
    for name in ("codes", "bytes", "floats"):
        assert main(["query", str(tmp_path / f"{name}.npy"), "--run", run, "-k", "3", "--json"]) == 0
        results = json.loads(capsys.readouterr().out)["results"]
        found[name] = [[(hit["id"], hit["distance"]) for hit in one["hits"]] for one in results]
    expected = index.search(index.codes(index.ids()[:2]), k=3)
    assert [[id_ for id_, _ in one] for one in found["codes"]] == expected.ids.tolist()
    assert found["bytes"] == found["floats"]


def test_the_uri_is_a_column_of_hits(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    id_ = int(BinaryIndex.load(f"{run}/index").ids()[5])
    assert main(["query", "--id", str(id_), "--run", run, "--columns", "uri", "-k", "40", "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)["results"][0]["hits"]
    assert [hit["columns"] for hit in hits] == [{"uri": f"digits/{hit['id']:04d}.png"} for hit in hits]


def test_codes_from_elsewhere_keep_their_class_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, labels = str(tmp_path / "run"), np.arange(20) % 2
    store = write_store(
        f"{run}/codes", some_codes(20), labels=labels, n_classes=2, class_names=["cat", "dog"]
    )
    BinaryIndex.build(store).save(f"{run}/index")
    assert ServedRun.open(ServeConfig(run=run)).class_names == ["cat", "dog"]
    assert main(["query", "--id", "3", "--run", run, "-k", "20", "--label", "cat", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert sorted(hit["id"] for hit in result["hits"]) == list(range(0, 20, 2))
    assert {name for hit in result["hits"] for name in hit["labels"]} == {"cat"}
    words = ["query", "--id", "3", "--run", run, "-k", "20", "--where"]
    assert main([*words, "labels in ('cat') and id < 9", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert sorted(hit["id"] for hit in result["hits"]) == [0, 2, 4, 6, 8]
    assert main([*words, "labels = 'cta'"]) == 2
    assert "there is no label 'cta'; did you mean 'cat'?" in capsys.readouterr().err


def test_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", modality="features")
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).random((3, 64)))
    assert main(["query", str(tmp_path / "rows.npy"), "--run", run, "-k", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [len(one["hits"]) for one in results] == [2, 2, 2]
    assert results[1]["query"].endswith("row 1")
    (tmp_path / "cat.jpg").touch()
    assert main(["query", str(tmp_path / "cat.jpg"), "--run", run]) == 2
    assert "run is a run of vectors" in (said := capsys.readouterr().err)
    assert "give a .npy file of rows, or --id" in said


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["no.png", "--run", "RUN"], 2, "no.png is not a file"),
        (["--run", "RUN"], 2, "give pictures"),
        (["--id", "99999999", "--run", "RUN"], 2, "no id 99999999"),
        (["--id", "99999999999999999999", "--run", "RUN"], 2, "--id must fit into int64, got 99999999999"),
        (["--id", "1", "--run", "/no/such/run"], 2, "/no/such/run does not exist; check the path"),
        (["--id", "ID", "--run", "RUN", "--label", "cat"], 2, "no label 'cat'"),
        (["--id", "ID", "--run", "RUN", "--label", "²"], 2, "no label '²'"),
        (["--id", "0", "--run", "RUN", "-k", "0"], 2, "at least 1"),
        (["--id", "1", "--url", "127.0.0.1:8000"], 2, "not a server's address"),
    ],
)
def test_mistakes(
    run: str, capsys: pytest.CaptureFixture[str], words: list[str], code: int, sentence: str
) -> None:
    known = {"RUN": run, "ID": str(BinaryIndex.load(f"{run}/index").ids()[0])}
    assert main(["query", *(known.get(word, word) for word in words)]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_asking_a_server_loads_neither_torch_nor_faiss(python: str, repo: Path) -> None:
    script = (
        "import sys\nfrom hashnet.cli import main\n"
        "import hashnet.cli.query as query\nquery._Server('http://127.0.0.1:1')\n"
        "assert not {'torch', 'faiss', 'ray', 'numba'} & set(sys.modules)"
    )
    subprocess.run([python, "-c", script], check=True, cwd=repo)


def test_files_that_cannot_be_used_are_named(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words.jpg").write_text("hello")
    np.save(tmp_path / "none.npy", np.zeros((0, 64), np.float32))
    (tmp_path / "empty.npy").touch()
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, features=np.zeros((1, 64), np.float32))
    for name, sentence in (
        ("words.jpg", "no picture in a format that is read here (JPEG, PNG,"),
        ("none.npy", "holds no row"),
        ("empty.npy", "cannot read"),
        ("several.npy", "holds several arrays"),
    ):
        assert main(["query", str(tmp_path / name), "--run", run]) == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert str(tmp_path / name) in said
