"""Names of a package that load on first use, so that importing it stays light."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """``__all__`` and ``__getattr__`` (PEP 562) of a package that imports its names under TYPE_CHECKING.

    Editors and type checkers read that block; so does this function, and loads each name when it is used.
    """
    home_of = _type_checking_imports(package)

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of[name]
        if home == package:  # the name is a module of the package
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(home_of), load


def _type_checking_imports(package: str) -> dict[str, str]:
    """Each name that the package imports under ``if TYPE_CHECKING``, and the module it comes from."""
    spec = sys.modules[package].__spec__
    source = spec.loader.get_source(package)  # type: ignore[union-attr]
    blocks = (node.body for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block if isinstance(node, ast.ImportFrom))
    home_of = {alias.name: str(node.module) for node in imports for alias in node.names}
    for name, home in home_of.items():
        if home == f"{package}.{name}":  # whichever was loaded last would count
            raise ImportError(f"{package} exports {name}, which is also a module of it; rename the module")
    return home_of
