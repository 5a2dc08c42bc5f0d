"""Damage of every kind for every file of a folder, and what its consumers make of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hashnet.errors import HashnetError

KINDS = ("flip", "truncate", "swap", "delete")


@dataclass(frozen=True)
class Consumer:
    """Reads a run: of a damaged one it gives the undamaged one's ``result``, or an error of hashnet's."""

    name: str
    result: Callable[[Path], Any]
    reads: tuple[str, ...]  # folders and files of the run
    must_refuse: Callable[[str], bool] = lambda name: False  # damage of which files it may not overlook


@dataclass
class Outcomes:
    """Counts by (kind of damage, outcome), and every outcome that must not be."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            f"{kind:9} {outcome:11} {n:6,}" for (kind, outcome), n in sorted(self.counts.items())
        )


def try_damage(run: Path, consumers: list[Consumer], n: int, part: int = 0, parts: int = 1) -> Outcomes:
    """The outcomes of ``n`` flips and truncations of each file, swaps with ``n`` / 3 others (at most with
    all of them), and the deletion of each file.

    An outcome is wrong where a result differs from the undamaged run's, or where an exception is not one
    of hashnet's; every consumer that reads the damaged file is tried. Of every ``parts`` files one is
    damaged, from the file ``part`` on.
    """
    expected = {consumer.name: consumer.result(run) for consumer in consumers}
    rng, found = np.random.default_rng(part), Outcomes()
    for kind, names, damage in _damages(run, n, rng, slice(part, None, parts)):
        with damage as what:
            for consumer in consumers:
                if not any(name.startswith(consumer.reads) for name in names):
                    continue
                outcome = _outcome(consumer, run, expected[consumer.name])
                if outcome == "unaffected" and any(map(consumer.must_refuse, names)):
                    outcome = "overlooked"
                found.counts[kind, outcome.partition(":")[0]] += 1
                if outcome not in ("unaffected", "refused"):
                    found.wrong.append(f"{what}: {consumer.name}: {outcome[:300]}")
    return found


def _outcome(consumer: Consumer, run: Path, expected: Any) -> str:
    try:
        return "unaffected" if consumer.result(run) == expected else "WRONG"
    except HashnetError:
        return "refused"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"


def _damages(
    run: Path, n: int, rng: np.random.Generator, chosen: slice
) -> Iterator[tuple[str, list[str], Any]]:
    files = sorted(
        path for path in run.rglob("*") if path.is_file() and path.name not in (".lock", ".compacting")
    )
    names = [str(path.relative_to(run)) for path in files]
    for path, name in zip(files[chosen], names[chosen], strict=True):
        yield "delete", [name], _changed({path: None}, name)
        whole = path.read_bytes()
        for _ in range(n if whole else 0):
            place, bit = int(rng.integers(len(whole))), int(rng.integers(8))
            flipped = whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :]
            yield "flip", [name], _changed({path: flipped}, f"{name} bit {bit} of byte {place}")
            length = int(rng.integers(len(whole)))
            yield "truncate", [name], _changed({path: whole[:length]}, f"{name} cut to {length} bytes")
    for a, path in list(enumerate(files))[chosen]:
        others = [b for b in range(len(files)) if b != a]
        for b in rng.choice(others, min(max(n // 3, 1), len(others)), replace=False).tolist():
            if b < a and n // 3 >= len(others):  # tried the other way round
                continue
            swapped = {path: files[b].read_bytes(), files[b]: path.read_bytes()}
            yield "swap", [names[a], names[b]], _changed(swapped, f"{names[a]} and {names[b]} swapped")


@contextmanager
def _changed(contents: dict[Path, bytes | None], what: str) -> Iterator[str]:
    """Files with other contents (None: without them) inside the block."""
    before = {path: path.read_bytes() for path in contents}
    for path, content in contents.items():
        path.unlink() if content is None else path.write_bytes(content)
    try:
        yield what
    finally:
        for path, content in before.items():
            path.write_bytes(content)
