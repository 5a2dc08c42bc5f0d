"""The kinds of index, one file each; flat is all defaults of IndexKind. A new kind is a file here and a line
in KINDS.

| kind      | k-NN                        | radius                              | filter |
|-----------|-----------------------------|-------------------------------------|--------|
| flat      | exact                       | exact                               | exact  |
| ivf       | the nprobe nearest lists    | the nprobe nearest lists            | widens |
| multihash | exact, through flat         | exact; by hash up to ``max_radius`` | exact  |
| hnsw      | graph walk                  | exact, through flat                 | exact  |
A filtered search of an ivf scans more lists until it has k hits; a small selection is compared whole.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from hashnet.errors import IndexMismatch, Unsupported
from hashnet.index.kinds.hnsw import Hnsw
from hashnet.index.kinds.ivf import Ivf
from hashnet.index.kinds.multihash import Multihash
from hashnet.index.segment import Flat, IndexKind, KindOptions
from hashnet.io import check_whole

MAX_OPTION = 2**31 - 2  # FAISS keeps options, and seed + 1, as C ints

KINDS: dict[str, IndexKind] = {kind.name: kind for kind in (Flat(), Ivf(), Multihash(), Hnsw())}


def parse_options(kind: str, values: Mapping[str, Any], n_bits: int, n: int) -> KindOptions:
    """Checked options of a kind, with those left open filled in for n codes of ``n_bits``."""
    if not isinstance(kind, str) or kind not in KINDS:
        got = repr(kind) if isinstance(kind, str) else type(kind).__name__  # labels, given as the third
        raise Unsupported(f"kind must be one of {', '.join(KINDS)}, got {got}")
    known = [field.name for field in dataclasses.fields(KINDS[kind].options)]
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise Unsupported(f"a {kind} index has no option {name!r}; {hint}")
        if check_whole(name, value, 0, IndexMismatch) > MAX_OPTION:
            raise IndexMismatch(f"{name} must be at most {MAX_OPTION}, got {value}")
    options = KINDS[kind].options(**{name: int(value) for name, value in values.items()})
    return KINDS[kind].complete(options, n_bits, n)
