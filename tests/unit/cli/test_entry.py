"""The command line: what it prints, and that a mistake is one sentence, exit code 2 and nothing written."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest

from hashnet.cli.entry import main
from hashnet.data.manifest import Manifest


def run(capsys, *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``hashnet WORDS``."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_digits_and_its_summary(tmp_path, capsys):
    code, out, err = run(capsys, "dataset", "digits", "--out", tmp_path / "m.parquet")
    assert (code, err) == (0, "")
    assert "1,797 pictures, 10 classes" in out
    assert "train           1,000 rows" in out
    assert "training pairs: 499,500, of them 49,671 similar, 9.06 dissimilar pairs per similar pair" in out
    assert Manifest.open(str(tmp_path / "m.parquet")).splits == {
        "train": 1000,
        "query": 197,
        "database": 1600,
    }


def test_the_summary_as_json(tmp_path, capsys):
    code, out, _ = run(
        capsys, "dataset", "digits", "--n-query", 10, "--n-train", 50, "--json", "--out", tmp_path / "m"
    )
    assert code == 0
    about = json.loads(out)
    assert about["splits"]["train"]["rows"] == 50
    assert about["sha256"] == Manifest.open(str(tmp_path / "m")).sha256


def test_every_option_reaches_its_source(tmp_path, capsys):
    words = "--n-images 60 --n-classes 4 --labels-per-image 2 --imbalance 3 --side 16 --store tar --seed 5"
    code, _, err = run(
        capsys,
        "dataset",
        "synthetic",
        *words.split(),
        "--n-query",
        6,
        "--n-train",
        20,
        "--out",
        tmp_path / "m",
    )
    assert (code, err) == (0, "")
    options = Manifest.open(str(tmp_path / "m")).source["options"]
    assert options["labels_per_image"] == 2
    assert options["n_query"] == 6
    assert options["store"] == "tar"
    assert (tmp_path / "m-images" / "shard-00000.tar").exists()


def write_lists(folder, n: int = 40) -> str:
    lines = [f"{i}.jpg {' '.join('1' if i % 3 == c else '0' for c in range(3))}\n" for i in range(n)]
    (folder / "all.txt").write_text("".join(lines))
    return str(folder / "all.txt")


def test_append_and_lists_on_the_command_line(tmp_path, capsys, caplog):
    path, out = write_lists(tmp_path), tmp_path / "m"
    assert run(capsys, "dataset", "listfile", path, "--n-query", "5", "--n-train", "20", "--out", out)[0] == 0
    code, _, err = run(capsys, "dataset", "append", out, "listfile", path)
    assert code == 2
    assert "40 of 40 rows are in" in err
    assert run(capsys, "dataset", "append", out, "listfile", path, "--existing", "skip")[0] == 0
    assert "40 of 40 rows were skipped: they are there already" in caplog.text
    root = ("--root", tmp_path / "others")
    code, text, _ = run(
        capsys, "dataset", "append", out, "listfile", path, *root, "--all-in", "database,train"
    )
    assert code == 0
    assert "80 pictures, 3 classes, 2 parts" in text
    assert Manifest.open(str(out)).splits == {"train": 60, "query": 5, "database": 75}


def test_pictures_that_are_nowhere_are_noticed(tmp_path, capsys):
    path = write_lists(tmp_path)
    code, _, err = run(capsys, "dataset", "listfile", path, "--root", "/nowhere", "--out", tmp_path / "m")
    assert code == 0
    assert "warning: 4 of 4 pictures cannot be used (4 missing): /nowhere/0.jpg, /nowhere/1.jpg" in err


def test_help_teaches(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "dataset" in out
    assert "inspect" in out
    code, out, _ = run(capsys, "dataset", "--help")
    assert code == 0
    for name in (
        "digits",
        "synthetic",
        "imagefolder",
        "listfile",
        "parquet",
        "webdataset",
        "npy",
        "imagenet100",
    ):
        assert name in out
    assert "hashnet dataset digits --out manifest.parquet" in out
    from hashnet.data.sources import SOURCES

    for name in SOURCES:
        code, out, _ = run(capsys, "dataset", name, "--help")
        assert code == 0
        assert "--out PATH" in out
        assert "--zero-shot" in out


def bad_inputs() -> dict[str, tuple[dict[str, str], list[str], str]]:
    """Name → (files to write, words, what the sentence must say)."""
    good = "a.jpg 1 0 0\nb.jpg 1 1 0\nc.jpg 0 0 1\n"
    listfile = ["listfile", "{folder}/list.txt"]
    return {
        "missing list": ({}, listfile, "cannot read the list {folder}/list.txt: "),
        "a folder, not a list": ({}, ["listfile", "{folder}"], "must hold query.txt"),
        "binary list": ({"list.txt": "\x00\x01"}, ["listfile", "{folder}/nope/list.txt"], "does not exist"),
        "wrong number of label columns": (
            {"list.txt": good + "d.jpg 1 0\n"},
            listfile,
            "list.txt line 4 has 2 label columns, its first line has 3; every line needs the same number",
        ),
        "label value not 0/1": (
            {"list.txt": good + "d.jpg 1 0 2\n"},
            listfile,
            "list.txt line 4: label column 3 is '2'; labels must be 0 or 1",
        ),
        "no similar pair": (
            {"list.txt": "a.jpg 1 0 0\nb.jpg 0 1 0\nc.jpg 0 0 1\n"},
            [*listfile, "--n-query", "0", "--n-train", "3"],
            "no two of the 3 training images share a label, so there is no similar pair to learn from",
        ),
        "unknown class": (
            {"pets/cat/1.jpg": "", "pets/dog/1.jpg": ""},
            ["imagefolder", "{folder}/pets", "--classes", "cat,dgo"],
            "1 of 2 classes are not in {folder}/pets, the first is 'dgo'; did you mean 'dog'?",
        ),
        "duplicated ids": (
            {"list.txt": good + "a.jpg 1 0 0\n"},
            listfile,
            "list.txt line 4 repeats 'a.jpg' of line 1 (1 duplicated ids in all); keep one of them",
        ),
        "fewer images than the protocol needs": (
            {"list.txt": good},
            [*listfile, "--n-query", "1", "--n-train", "5000"],
            "5,000 training rows were requested, but there are only 2 to draw from; lower n_train",
        ),
        "more queries than images": (
            {"list.txt": good},
            [*listfile, "--n-query", "4"],
            "4 query rows were requested, but there are only 3 to draw from; lower n_query",
        ),
        "a number that is none": (
            {"list.txt": good},
            [*listfile, "--n-query", "many"],
            "n_query: must be whole number | none, got 'many'",
        ),
        "unknown source": ({}, ["imagefolderr"], "there is no 'imagefolderr'; did you mean 'imagefolder'?"),
        "unknown option": ({"list.txt": good}, [*listfile, "--rot", "x"], "unrecognized arguments: --rot x"),
        "no path": ({}, ["parquet"], "the following arguments are required: PATH"),
        "pickle": (
            {"f.npy": "\x80\x04K\x01."},
            ["npy", "{folder}/f.npy"],
            "cannot read {folder}/f.npy as numpy arr",
        ),
    }


def test_the_nearest_command_is_suggested(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["querry", "cat.jpg"])
    assert "there is no 'querry'; did you mean 'query'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["query", "--id", "1", "--run", "r", "--lables", "x"], "--lables; did you mean --label?"),
        (["query", "--id", "1", "--run", "r", "--colums=a"], "--colums=a; did you mean --columns?"),
        (["dataset", "npy", "f.npy", "--out", "m", "--lables", "x"], "--lables x; did you mean --labels?"),
        (["serve", "runs/demo", "--prt", "80", "k=5"], "arguments: --prt; did you mean --port?"),
        (["query", "--id", "1", "--run", "r", "--zzz"], "arguments: --zzz\n"),
    ],
)
def test_the_nearest_option_is_suggested(capsys, words, said):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input_is_one_sentence_and_nothing_is_written(tmp_path, capsys, case):
    files, words, sentence = bad_inputs()[case]
    folder = tmp_path / "input"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    words = [word.format(folder=folder) for word in words]
    code, out, err = run(capsys, "dataset", *words, "--out", tmp_path / "out" / "m.parquet")
    assert code == 2
    assert sentence.format(folder=folder) in err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "out" / "m.parquet").exists()
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_manifest_whose_sha256_does_not_match(tmp_path, capsys):
    path, out = write_lists(tmp_path), tmp_path / "m"
    assert run(capsys, "dataset", "listfile", path, "--out", out)[0] == 0
    part = out / "part-00000.parquet"
    data = bytearray(part.read_bytes())
    data[50] ^= 255
    part.write_bytes(data)
    code, text, _ = run(capsys, "inspect", out)
    assert code == 1
    assert "PROBLEM: " in text
    assert "part-00000.parquet is damaged: its sha256 is" in text
    assert "NOT sound" in text
    code, text, err = run(capsys, "dataset", "append", out, "listfile", path)
    assert (code, text) == (2, "")
    assert "part-00000.parquet is damaged" in err
    assert sorted(p.name for p in out.iterdir()) == ["_manifest.json", "part-00000.parquet"]


def test_an_existing_manifest_is_not_replaced_by_mistake(tmp_path, capsys):
    words = ("dataset", "digits", "--out", tmp_path / "m")
    assert run(capsys, *words)[0] == 0
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "exists; choose another --out, or replace it with --overwrite" in err
    assert run(capsys, *words, "--overwrite", "--n-train", "500")[0] == 0
    assert Manifest.open(str(tmp_path / "m")).count("train") == 500


def test_append_to_what_is_no_manifest(tmp_path, capsys):
    code, _, err = run(capsys, "dataset", "append", tmp_path / "none", "digits")
    assert code == 2
    assert "holds no manifest" in err


def test_a_command_is_needed(capsys):
    assert run(capsys)[0] == 2
    assert run(capsys, "nonsense")[0] == 2
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("hashnet ")


def test_as_a_program_without_a_stack_trace(tmp_path, python, repo):
    words = [
        python,
        "-m",
        "hashnet.cli",
        "dataset",
        "npy",
        str(tmp_path / "none.npy"),
        "--out",
        str(tmp_path / "m"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, cwd=repo)
    assert done.returncode == 2
    assert done.stderr.startswith("hashnet dataset: ")
    assert "none.npy does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_package_is_named(tmp_path, python, repo):
    """The base install has no scikit-learn: the sentence says what to install."""
    code = (
        "import sys; sys.modules['sklearn'] = None; from hashnet.cli import main; "
        f"sys.exit(main(['dataset', 'digits', '--out', '{tmp_path}/m']))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=repo)
    assert done.returncode == 2
    assert done.stderr.startswith("hashnet dataset needs sklearn")
    assert "pip install 'hashnet[train]'" in done.stderr


def test_features_are_described(tmp_path, capsys):
    np.save(tmp_path / "f.npy", np.eye(6, dtype=np.float32))
    code, out, _ = run(capsys, "dataset", "npy", tmp_path / "f.npy", "--out", tmp_path / "m")
    assert code == 0
    assert "6 feature vectors of 6 values, no labels" in out
