"""README and guides say what is so: commands parse or run as printed, names and links lead somewhere."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn

from cluster.runtime import telemetry
from cluster.runtime.job import read_settings
from hashnet import CodeStore, Manifest
from hashnet.cli import entry as cli
from hashnet.data.sources import digits
from hashnet.errors import HashnetError
from hashnet.server import BatchEncoder, ServeConfig, ServedRun
from tests.support import cluster_demo
from tests.support.local_cluster import free_ports
from tests.support.serving_app import make_app
from tests.support.small_run import make_run

REPO = Path(__file__).resolve().parents[2]
GUIDES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (REPO / "docs").glob("*.md"))]
JOBS = sorted(path.stem for path in (REPO / "jobs").glob("*.py") if path.stem != "__init__")
NOT_OURS = {
    "columns",
    "key",
    "rescore",
    "secret_key",
    "text_ids",
    "token",
    "weights_only",
    "where",
}  # NAME=value in a guide that is no setting of a job


def read(name):
    return (REPO / name).read_text()


def blocks(text, fence=None):
    """Lines of indented blocks without their comments; or the ```fence ones, whole."""
    if fence:
        return re.findall(rf"^```{fence}\n(.*?)^```", text, re.M | re.S)
    return [re.sub(r"\s+#.*", "", line).strip() for line in re.findall(r"^ {4,}(\S.*)$", text, re.M)]


def spans(text):
    """What stands between backticks in a line of prose."""
    return re.findall(r"`([^`\n]+)`", text)


def job_settings(job, monkeypatch):
    """The configuration class of jobs/JOB.py, as its last line names it."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # a job puts its checkout first
    (name,) = re.findall(r"run_job\((\w+), ", read(f"jobs/{job}.py"))
    return getattr(importlib.import_module(f"jobs.{job}"), name)


def job_commands():
    """(where, job, words) of every `python jobs/JOB.py …` that is printed anywhere."""
    places = [*GUIDES, "ray_cluster.yaml", *(f"jobs/{job}.py" for job in JOBS)]
    places += [f"jobs/configs/{path.name}" for path in (REPO / "jobs/configs").glob("*.yaml")]
    places += [f"docs/examples/{path.name}" for path in (REPO / "docs/examples").glob("*.sh")]
    for name in places:
        text = read(name).replace("\\\\\n", " ")  # a command in a docstring may go on in the next line
        for job, rest in re.findall(r"jobs/(\w+)\.py((?: +[\w./$-]+(?:=[^\s`#]*)?)*)", text):
            yield name, job, rest.split()


@pytest.mark.parametrize("job", JOBS)
def test_every_printed_job_takes_its_settings(job, monkeypatch):
    monkeypatch.chdir(REPO)
    settings = job_settings(job, monkeypatch)
    found = [(name, words) for name, other, words in job_commands() if other == job]
    assert any(name in GUIDES for name, _ in found), f"no guide shows jobs/{job}.py"
    for name, words in found:
        given = [word for word in words if "=" in word]
        if not any(word.startswith("run=") for word in given):
            given.append("run=/runs/demo")  # an excerpt in a sentence
        if "--config" in words and words[words.index("--config") + 1].startswith("jobs/"):
            given += ["--config", words[words.index("--config") + 1]]
        try:
            read_settings(settings, given)
        except HashnetError as error:
            pytest.fail(f"{name}: jobs/{job}.py {' '.join(words)}: {error}")


def test_only_jobs_that_exist_are_named():
    assert {job for _, job, _ in job_commands()} <= {*JOBS, "NAME", "X"}


def test_settings_named_in_a_sentence_exist(monkeypatch):
    keys = set()
    for job in JOBS:
        keys |= set(job_settings(job, monkeypatch).__dataclass_fields__)
    for name in GUIDES:
        for span in spans(read(name)):
            for word in re.findall(r"(?:^| )([a-z][a-z_]*)=", span if "://" not in span else ""):
                assert word in keys | NOT_OURS, f"{name}: `{span}`"


def hashnet_commands(name):
    text = read(name)
    for line in [*blocks(text), *spans(text)]:
        if line.startswith("hashnet ") and not re.search(r"\bNAME\b|\||--help", line):
            words = shlex.split(line)[1:]
            if len(words) > 1:
                yield words


@pytest.mark.parametrize("name", GUIDES)
def test_every_printed_hashnet_command_parses(name, monkeypatch):
    for words in hashnet_commands(name):
        here = words[0] in cli.COMMANDS_HERE
        module = cli if here else importlib.import_module(f"hashnet.cli.{words[0]}")
        monkeypatch.setattr(module, f"_{words[0]}" if here else "run", lambda arguments: 0)
        assert cli.main(words) == 0, words


def test_every_make_target_and_variable_exists():
    makefile = read("Makefile")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.M))
    for name in GUIDES:
        text = read(name)
        for line in [*blocks(text), *spans(text)]:
            if line.startswith("make "):
                target, *variables = line.split()[1:]
                assert target in targets, f"{name}: {line}"
                for variable in re.findall(r"\b([A-Z]+)=", " ".join(variables)):
                    assert f"$({variable})" in makefile, f"{name}: {line}"
    (phony,) = re.findall(r"^\.PHONY: (.*)", makefile, re.M)
    assert set(phony.split()) == targets


def test_make_refuses_a_variable_that_it_does_not_know():
    done = subprocess.run(["make", "demo", "IMAGE=pets"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2
    assert "make knows no variable IMAGE; there are VENV" in done.stderr


def test_paths_and_links_lead_somewhere():
    for name in GUIDES:
        text = read(name)
        folder = (REPO / name).parent
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert "://" in link or (folder / link).exists(), f"{name}: {link}"
        for path in re.findall(r"(?:hashnet|cluster|jobs|tests|docs)/[\w/.-]*\w", " ".join(spans(text))):
            if "NAME" not in path:
                assert (REPO / path).exists(), f"{name}: {path}"


@pytest.mark.parametrize("name", GUIDES)
def test_measured_parts_are_there(name):
    assert not re.search(r"<!-- (\w+): begin -->\s*<!-- \1: end -->", read(name))


def test_the_tree_of_the_guide_is_there():
    layout = read("docs/architecture.md").split("## The tree")[1].split("##")[0]
    parent, named = "", {"hashnet/": set(), "cluster/": set()}
    for line in layout.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if re.match(r" {4}\S", line):
            parent = names[0]
            assert all((REPO / name).exists() for name in names), line
        elif parent in named:
            named[parent].update(name.rstrip("/") for name in names)
    for folder, names in named.items():
        there = {
            path.stem for path in (REPO / folder).iterdir() if not path.name.startswith(("_", "py.", "."))
        }
        assert names == there, folder


def test_the_cluster_demo_submits_what_the_readme_prints():
    printed = re.findall(r"^ +ray job submit --working-dir \. -- (.*)$", read("README.md"), re.M)
    demo = [" ".join(words) for words in cluster_demo.jobs("$PWD/runs/demo").values()]
    assert printed[: len(demo)] == demo


def test_the_guide_lists_every_metric_with_its_tags():
    rows = re.findall(r"^\| `ray_(\w+)` \| (\w+) \| ([\w, ]+) \| (.*) \|$", read("docs/operate.md"), re.M)
    ours = [
        (about.full_name(name), about.kind, ", ".join(("run", *about.tags)), about.meaning)
        for name, about in telemetry.METRICS.items()
    ]
    assert [(*row[:3], row[3].replace("\\|", "|")) for row in rows] == ours


def test_the_python_example_runs_as_printed(capsys):
    (example,) = blocks(read("README.md"), "python")
    short = "n_bits=48, stages=2, first_epochs=2, stage_epochs=1, lr=0.02"
    assert "n_bits=48)" in example
    exec(compile(example.replace("n_bits=48", short), "README.md", "exec"), {})
    first, second = (float(word) for word in capsys.readouterr().out.split())
    assert 0 < first <= 1
    assert 0 < second <= 1


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(URL, folder) of a server over a small runs/demo, beside which cat.jpg lies."""
    folder = tmp_path_factory.mktemp("served")
    run = make_run(folder / "runs/demo")
    (folder / "cat.jpg").write_bytes(_png())
    encoder = BatchEncoder(f"{run}/model", "cpu", 1_000_000, 2)
    app = make_app(ServedRun.open(ServeConfig(run=run)), encoder)
    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    yield f"127.0.0.1:{port}", folder
    server.should_exit = True
    thread.join(20)


def test_inspect_and_query_run_as_printed(served, monkeypatch, capsys):
    address, folder = served
    monkeypatch.chdir(folder)
    ran = []
    for words in hashnet_commands("README.md"):
        if words[0] == "inspect" or "--url" in words:
            assert cli.main([word.replace("127.0.0.1:8000", address) for word in words]) == 0, words
            ran.append(words[0])
    assert sorted(set(ran)) == ["inspect", "query"]


@pytest.fixture
def here(served, monkeypatch):
    """What the guide to serving prints, with this server's address and items that its small run has."""
    address, folder = served
    monkeypatch.chdir(folder)
    first, second = CodeStore.open("runs/demo/codes").ids()[:2]

    def changed(text):
        return text.replace("17", str(first)).replace("42", str(second)).replace("127.0.0.1:8000", address)

    return changed


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_guide_to_serving_asks_by_curl_as_printed(here):
    curls = [line for line in blocks(read("docs/serve.md")) if line.startswith("curl ")]
    assert len(curls) == 3
    for line in curls:
        done = subprocess.run([*shlex.split(here(line)), "-sSf"], capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout.startswith("{"), line


def test_the_guide_to_serving_runs_as_printed(here):
    (example,) = blocks(read("docs/serve.md"), "python")
    lines = [  # a model of pictures, classes that are digits, no columns, no vectors, nobody may write
        line
        for line in example.splitlines()
        if not re.search(r"features, radius|where=|rescore=|client\.(add|remove)|keys=", line)
    ]
    assert len(lines) == len(example.splitlines()) - 10
    code = here("\n".join(lines)).replace('"cat", 7', '"3", 7')
    names = {"codes": CodeStore.open("runs/demo/codes-query").codes()}
    shutil.copy("cat.jpg", "dog.jpg")
    exec(compile(code, "docs/serve.md", "exec"), names)
    assert names["codes"].shape == (2, 8)


def _png():
    return digits.load(digits.Options()).payload(0, 1)["image"][0].as_py()


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    """What docs/your-data.md takes for granted, in small: /data is ``tmp_path``/data."""
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "picture.png"
    picture.write_bytes(_png())
    for i in range(5600):
        place = tmp_path / f"data/pets/class-{i % 4}"
        place.mkdir(parents=True, exist_ok=True)
        os.link(picture, place / f"{i}.png")
    for path in ("data/more-pets/class-1/new.png", *(f"data/coco/{name}.png" for name in "abcd")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, tmp_path / path)
    (tmp_path / "lists").mkdir()
    train = "a.png 0 1\nb.png 0 1\nc.png 1 0\n"
    for split, lines in {"train": train, "query": "d.png 1 0\n", "database": train}.items():
        (tmp_path / f"lists/{split}.txt").write_text(lines)
    for i in range(100):
        with tarfile.open(tmp_path / f"shard-{i:03d}.tar", "w") as tar:
            (tmp_path / "label.txt").write_text(str(i % 3))
            tar.add(picture, f"{i}.png")
            tar.add(tmp_path / "label.txt", f"{i}.cls")
    table = pa.table({"image": [picture.read_bytes()] * 40, "label": [i % 4 for i in range(40)]})
    pq.write_table(table, tmp_path / "part-0.parquet")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 6100)
    np.save("labels.npy", labels)
    features = (rng.normal(size=(6100, 16)) + 3 * np.eye(5, 16)[labels]).astype(np.float32)
    np.save("features.npy", features)
    codes = np.packbits(features >= 0, axis=1)
    np.save("codes.npy", codes)
    np.save("ids.npy", np.arange(6100))
    (tmp_path / "names.txt").write_text("".join(f"{i}.png\n" for i in range(6100)))
    further = {
        "url": [f"u/{i}" for i in range(200)],
        "year": [2000 + i % 20 for i in range(200)],
        "city": ["Rome"] * 200,
    }
    pq.write_table(pa.table({"vector": list(features[:200]), **further}), "places.parquet")
    for name, some in {"embeddings": slice(0, 200), "queries": slice(200, 400)}.items():
        columns = {"code": [code.tobytes() for code in codes[some]], "class": labels[some], **further}
        pq.write_table(pa.table(columns), f"{name}.parquet")
    return tmp_path


def write_clicks():
    """Twenty similar and twenty dissimilar pairs of training rows; those not listed are unknown."""
    rows = Manifest.open("unlabelled.parquet").read("train")["row_id"].to_numpy()
    labels = np.load("labels.npy")[rows]
    groups = [rows[labels == c] for c in (0, 1)]
    pairs = {"row_a": [*groups[0][:20], *groups[0][:20]], "row_b": [*groups[0][20:40], *groups[1][:20]]}
    pq.write_table(pa.table({**pairs, "similar": [True] * 20 + [False] * 20}), "clicks.parquet")


def your_data_commands(own_data):
    return [line.replace("/data/", f"{own_data}/data/") for line in blocks(read("docs/your-data.md"))]


def test_the_guide_to_own_data_runs_as_printed(own_data, capsys):
    ran = set()
    for line in your_data_commands(own_data):
        if line.startswith("hashnet "):
            words = shlex.split(line)[1:]
            assert cli.main(words) == 0, (line, capsys.readouterr().err)
            ran.add(words[1])
    assert ran >= {"imagefolder", "listfile", "webdataset", "parquet", "npy", "append"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_jobs_of_the_guide_run_as_printed(own_data):
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    lines = [
        line
        for line in your_data_commands(own_data)
        if re.search("vectors|unlabelled|runs/sweep|runs/mine", line)
    ]
    assert sum(line.startswith("python jobs/") for line in lines) == 9
    for line in lines:
        if "pairs=" in line:
            write_clicks()
        done = subprocess.run(
            line.replace("jobs/", f"{REPO}/jobs/"), shell=True, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, (line, done.stderr)


def test_everything_the_library_needs_is_packaged():
    patterns = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["package-data"]["hashnet"]
    for path in (REPO / "hashnet").rglob("*.*"):
        if path.suffix != ".py" and "__pycache__" not in path.parts:
            assert any(path.match(pattern.removeprefix("**/")) for pattern in patterns), path


DOWNLOADED = "Downloading https://host/p/torch-2.1-cp311.whl (821.0 MB)\n"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("Collecting torch\n  Downloading torch-2.1-x.whl.metadata (25 kB)\n", "reading what is needed"),
        (f"Collecting moto[server]==5\n{DOWNLOADED}", "fetching torch (821.0 MB)"),
        (f"{DOWNLOADED}Installing collected packages: torch\n", "unpacking"),
        ("Installing collected packages: wheel\nObtaining file:///clone\n", "reading what is needed"),
    ],
)
def test_set_up_says_what_pip_is_doing(tmp_path, log, said):
    (tmp_path / "install.log").write_text(log)
    done = subprocess.run(
        [REPO / ".ci/pip-stage", tmp_path / "install.log"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{said}\n"
