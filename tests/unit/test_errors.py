"""The exception tree is the one its docstring draws."""

import inspect
import pickle
import re

import pytest

from hashnet import errors


def test_the_drawn_tree_is_the_real_one():
    tree = errors.__doc__.partition("\n\n")[2].partition("\n\n")[0]
    drawn = set(re.findall(r"[A-Z]\w+(?=\s{2,}|\n|$)", tree))
    real = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)}
    assert real <= drawn
    for line in tree.splitlines():
        name = re.search(r"[A-Z]\w+", line).group()
        depth = (line.index(name) - 4) // 4
        assert (
            len([c for c in getattr(errors, name).__mro__ if c.__module__ == "hashnet.errors"]) == depth + 1
        )


def test_every_error_of_the_library_is_in_the_docstring(repo):
    bases = "|".join(name for name, _ in inspect.getmembers(errors, inspect.isclass))
    sources = "\n".join(path.read_text() for path in (repo / "hashnet").rglob("*.py"))
    defined = set(re.findall(rf"^class (\w+)\((?:errors\.)?(?:{bases})\b", sources, re.M))
    assert {"ApiError", "StaleIndex"} <= defined
    for name in defined:
        assert re.search(rf"\b{name}\b", errors.__doc__), name


@pytest.mark.parametrize(
    "error",
    [
        errors.BadImage("broken", "no header"),
        errors.ConfigError(["a", "b"]),
        errors.RequestRejected("no", "bad_k", 422),
        errors.NotInstalled("hashnet.Encoder", "torch"),
    ],
)
def test_errors_survive_the_way_through_ray(error):
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert type(copy) is type(error)


def test_unknown_id_prints_its_sentence():
    assert str(errors.UnknownId("id 7 is not in the index")) == "id 7 is not in the index"
