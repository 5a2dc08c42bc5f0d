"""hashnet: learned binary codes for images and embeddings, encoded on Ray, searched with FAISS.

Names load on first use: ``import hashnet`` pulls in neither torch nor faiss, so that a client
needs only numpy, pyarrow and httpx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {  # public name → the module it lives in
    "AsyncClient": "hashnet.client",
    "BinaryIndex": "hashnet.index",
    "Client": "hashnet.client",
    "CodeStore": "hashnet.store",
    "Encoder": "hashnet.encoding",
    "EvalReport": "hashnet.metrics",
    "HashNet": "hashnet.training",
    "HashnetError": "hashnet.errors",
    "Manifest": "hashnet.data",
    "Run": "hashnet.run",
    "SearchResult": "hashnet.results",
    "evaluate": "hashnet.metrics",
    "near_duplicates": "hashnet.dedup",
}
_MODULES = ("baselines", "codes", "errors", "labels")

__all__ = sorted([*_HOME, *_MODULES, "__version__"])

if TYPE_CHECKING:
    from hashnet import baselines, codes, errors, labels
    from hashnet.client import AsyncClient, Client
    from hashnet.data import Manifest
    from hashnet.dedup import near_duplicates
    from hashnet.encoding import Encoder
    from hashnet.errors import HashnetError
    from hashnet.index import BinaryIndex
    from hashnet.metrics import EvalReport, evaluate
    from hashnet.results import SearchResult
    from hashnet.run import Run
    from hashnet.store import CodeStore
    from hashnet.training import HashNet


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _MODULES:
        raise AttributeError(f"module 'hashnet' has no attribute {name!r}")
    try:
        if name in _MODULES:
            return importlib.import_module(f"hashnet.{name}")
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("hashnet"):
            raise
        from hashnet.errors import NotInstalled

        raise NotInstalled(f"hashnet.{name}", error.name) from None


def __dir__() -> list[str]:
    return __all__
