"""What is read from files cannot run code: no pickle, no eval, no shell, in any of the three packages."""

import ast

import pytest

PACKAGES = ("hashnet", "cluster", "jobs")
NEVER_IMPORTED = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__"}


def sources(repo):
    return [path for package in PACKAGES for path in sorted((repo / package).rglob("*.py"))]


def calls(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}


def test_nothing_is_unpickled(repo):
    for path in sources(repo):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & NEVER_IMPORTED, path


def test_loaders_are_told_to_load_data_only(repo):
    for path in sources(repo):
        for name, words in calls(path):
            if name == "torch.load":
                assert words.get("weights_only") == "True", path
            if name in ("np.load", "numpy.load"):
                assert words.get("allow_pickle", "False") == "False", path
            assert name != "yaml.load", f"{path}: yaml.safe_load"
            assert name not in NEVER_CALLED, f"{path}: {name}"
            assert words.get("shell", "False") == "False", path


def check(repo):
    test_nothing_is_unpickled(repo)
    test_loaders_are_told_to_load_data_only(repo)


@pytest.mark.parametrize("bad", ["import pickle", "torch.load(f)", "yaml.load(t)", "run(c, shell=True)"])
def test_the_checks_above_find_what_they_look_for(tmp_path, bad):
    (tmp_path / "hashnet").mkdir()
    (tmp_path / "hashnet" / "bad.py").write_text(bad + "\n")
    with pytest.raises(AssertionError):
        check(tmp_path)
