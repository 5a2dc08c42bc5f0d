"""Names that load on first use, as the package imports them for type checkers."""

import sys

import pytest


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes an importable package of these files and gives its import."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, init, **modules):
        folder = tmp_path / name
        folder.mkdir()
        top = "from typing import TYPE_CHECKING\nfrom hashnet.io import lazy_names\nif TYPE_CHECKING:\n"
        (folder / "__init__.py").write_text(f"{top}{init}__all__, __getattr__ = lazy_names(__name__)\n")
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text)
        return __import__(name)

    return make


def test_a_name_loads_its_module_and_no_other(package):
    lines = (
        "from lazy_a import tools",
        "from lazy_a.heavy import big, bigger",
        "from lazy_a.light import small",
    )
    init = "".join(f"    {line}\n" for line in lines)
    made = package("lazy_a", init, heavy="big, bigger = 1, 2\n", light="small = 3\n", tools="hammer = 4\n")
    assert made.__all__ == ["big", "bigger", "small", "tools"]
    assert made.small == 3
    assert "lazy_a.heavy" not in sys.modules
    assert "lazy_a.tools" not in sys.modules
    assert made.tools.hammer == 4
    from lazy_a import bigger

    assert bigger == 2
    with pytest.raises(AttributeError, match="'lazy_a' has no attribute 'huge'"):
        _ = made.huge


def test_a_name_that_is_also_a_module_is_refused(package):
    """Whether the one or the other is found would depend on what was imported before."""
    with pytest.raises(ImportError, match="lazy_b exports sort, which is also a module of it"):
        package("lazy_b", "    from lazy_b.sort import sort\n", sort="sort = sorted\n")
