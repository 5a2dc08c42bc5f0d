"""Each extra of pyproject.toml brings what its users call, and a missing one is named."""

import os
import re
import subprocess
import tomllib

import pytest

from hashnet.errors import EXTRAS
from tests.support.small_run import make_run

# Distribution → the modules it provides, where the two names differ or a distribution brings others.
PROVIDES = {
    "faiss-cpu": {"faiss"},
    "faiss-gpu": {"faiss"},
    "pillow": {"PIL"},
    "prometheus-client": {"prometheus_client"},
    "pyyaml": {"yaml"},
    "scikit-learn": {"sklearn", "threadpoolctl"},
}


@pytest.fixture(scope="module")
def extras(repo):
    return tomllib.loads((repo / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def modules_of(extras, name):
    """Every module that an extra brings, the extras it is made of included."""
    found = set()
    for requirement in extras[name]:
        inner = re.fullmatch(r"hashnet\[(.*)\]", requirement)
        if inner:
            found |= set().union(*(modules_of(extras, part) for part in inner.group(1).split(",")))
        else:
            distribution = re.match(r"[\w-]+", requirement).group()
            found |= PROVIDES.get(distribution, {distribution})
    return found


def without(modules, code):
    """``code`` in a process that cannot import ``modules``."""
    return f"import sys; sys.modules.update(dict.fromkeys({sorted(modules)!r})); {code}"


def outside(extras, name):
    """What an install with the extra ``name`` alone lacks."""
    return modules_of(extras, "cluster") - modules_of(extras, name)


def test_the_sentence_names_an_extra_that_brings_the_package(extras):
    for module, extra in EXTRAS.items():
        assert module in modules_of(extras, extra), f"{module} does not come with {extra}"
    assert modules_of(extras, "cluster") - EXTRAS.keys() == {"ray"}


def test_the_gpu_extra_differs_by_the_build_of_faiss_alone(extras):
    assert modules_of(extras, "gpu") == modules_of(extras, "cluster")


def test_searching_codes_needs_neither_torch_nor_ray(extras, python, repo, tmp_path):
    assert {"torch", "ray"} <= outside(extras, "search")
    code = f"""
import numpy as np
import hashnet
from hashnet.index.kinds import KINDS
codes, labels = np.arange(800, dtype=np.uint8).reshape(100, 8), np.arange(100) % 5
for kind in KINDS:
    hashnet.BinaryIndex.from_arrays(codes, kind=kind).save(r"{tmp_path}/" + kind)
    hits = hashnet.BinaryIndex.load(r"{tmp_path}/" + kind).search(codes[:3], k=1)
    assert hits.ids.ravel().tolist() == [0, 1, 2]
assert hashnet.evaluate(codes[:5], labels[:5], codes, labels, k=10).n_queries == 5
assert len(hashnet.near_duplicates(codes, radius=0).a) > 0  # bytes repeat after 32 rows
"""
    subprocess.run([python, "-c", without(outside(extras, "search"), code)], check=True, cwd=repo)


def test_the_server_needs_neither_torch_nor_ray(extras, python, repo):
    assert {"torch", "ray"} <= outside(extras, "serve")
    code = "import hashnet.cli, hashnet.server as s; [getattr(s, name) for name in s.__all__]"
    subprocess.run([python, "-c", without(outside(extras, "serve"), code)], check=True, cwd=repo)


def test_a_name_whose_extra_is_missing_says_which(python, repo):
    code = without({"torch"}, "import hashnet; hashnet.Encoder.load")
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=repo)
    assert done.stderr.rstrip().endswith(
        "needs torch, which is not installed: pip install 'hashnet[train]', or in a checkout '.[train]'"
    )


def test_a_server_whose_packages_are_missing_does_not_start(python, repo, tmp_path):
    run = make_run(tmp_path)
    code = f"from hashnet.cli import main; sys.exit(main(['serve', {run!r}]))"
    words = [python, "-c", without({"uvloop"}, code)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=repo, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("hashnet serve needs uvloop, which is not installed: pip install")


def test_a_folder_called_hashnet_does_not_hide_the_installed_package(python, tmp_path):
    (tmp_path / "hashnet").mkdir()  # a clone, for instance
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [python, "-c", "import hashnet; print(hashnet.HashNet)"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=outside)
    assert "HashNet" in done.stdout, done.stderr
