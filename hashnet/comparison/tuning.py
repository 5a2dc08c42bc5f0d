"""Choosing settings by validation MAP: trials averaged over seeds, the best ones kept in a tuned.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hashnet.comparison.cell import CellResult
from hashnet.io import read_sealed, write_sealed

KIND, FORMAT_VERSION = "tuned", 1
Choices = Mapping[str, Mapping[int, Any]]  # by method and code length


@dataclass(frozen=True)
class SettingsScore:
    """One method at one code length with one choice of settings: means over ``n_seeds`` trials.

    ``validation_map`` is None where the trial of a seed diverged (``error`` says so). J, L and
    ``binary_share`` (of |g| > 0.99) are None for shallow methods.
    """

    method: str
    n_bits: int
    settings: dict[str, Any]
    n_seeds: int
    validation_map: float | None
    seconds: float | None
    J: float | None = None
    L: float | None = None
    binary_share: float | None = None
    error: str | None = None

    @property
    def rank(self) -> float:
        """What scores are compared by: validation MAP, below all others where there is none."""
        return -1.0 if self.validation_map is None else self.validation_map


def mean_over_seeds(trials: Iterable[CellResult]) -> list[SettingsScore]:
    """One score per method, code length and settings, in the order of the trials."""
    groups: dict[tuple[str, int, str], list[CellResult]] = {}
    for trial in trials:
        made = trial.made_from
        key = (made.method, made.n_bits, json.dumps(made.settings, sort_keys=True))
        groups.setdefault(key, []).append(trial)
    return [_score(group) for group in groups.values()]


def _score(group: list[CellResult]) -> SettingsScore:
    made = group[0].made_from

    def of_network(name: str) -> float | None:
        return _mean([getattr(trial.training, name, None) for trial in group])

    return SettingsScore(
        made.method,
        made.n_bits,
        made.settings,
        n_seeds=len(group),
        validation_map=_mean([trial.validation_map for trial in group]),
        seconds=of_network("seconds") or _mean([None if trial.error else trial.fit_s for trial in group]),
        J=of_network("J"),
        L=of_network("L"),
        binary_share=of_network("binary_share"),
        error=next((trial.error for trial in group if trial.error), None),
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


@dataclass(frozen=True)
class TunedSettings:
    """The settings chosen for each method and code length: ``settings[method][n_bits]``."""

    settings: Choices
    validation_map: Choices

    @classmethod
    def choose(cls, scores: Iterable[SettingsScore]) -> TunedSettings:
        """The settings with the highest validation MAP; of equal ones the first. Diverged ones never."""
        best: dict[str, dict[int, SettingsScore]] = {}
        for score in scores:
            column = best.setdefault(score.method, {})
            held = column.get(score.n_bits)
            if score.validation_map is not None and (held is None or score.rank > held.rank):
                column[score.n_bits] = score
        return cls(
            {method: {n: score.settings for n, score in column.items()} for method, column in best.items()},
            {method: {n: score.rank for n, score in column.items()} for method, column in best.items()},
        )

    @classmethod
    def load(cls, uri: str) -> TunedSettings:
        """A tuned.json, as a comparison or a sweep wrote it."""
        values = read_sealed(uri, KIND, FORMAT_VERSION, "remove its seal if the change is yours")
        return cls(_with_whole_keys(values["settings"]), _with_whole_keys(values.get("validation_map", {})))

    def save(self, uri: str) -> None:
        values = {"settings": self.to_dict(), "validation_map": _with_text_keys(self.validation_map)}
        write_sealed(uri, KIND, FORMAT_VERSION, values)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The settings for JSON: method → code length as text → settings."""
        return _with_text_keys(self.settings)

    def extended(self, other: TunedSettings) -> TunedSettings:
        """Both choices together; where both chose, this one's stays."""
        return TunedSettings(
            _extended(self.settings, other.settings), _extended(self.validation_map, other.validation_map)
        )

    def nearest(self, method: str, n_bits: int) -> dict[str, Any]:
        """The settings chosen at the code length nearest to ``n_bits``, of two equally near the shorter one.

        >>> tuned = TunedSettings({"itq": {16: {"a": 1}, 48: {"a": 2}}}, {})
        >>> tuned.nearest("itq", 32), tuned.nearest("lsh", 32)
        ({'a': 1}, {})
        """
        known = self.settings.get(method, {})
        length = min(known, key=lambda length: (abs(length - n_bits), length), default=None)
        return {} if length is None else known[length]


def _extended(one: Choices, other: Choices) -> Choices:
    return {name: {**other.get(name, {}), **one.get(name, {})} for name in (*one, *other)}


def _with_text_keys(table: Choices) -> dict[str, dict[str, Any]]:
    return {name: {str(n_bits): value for n_bits, value in row.items()} for name, row in table.items()}


def _with_whole_keys(table: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[int, Any]]:
    return {name: {int(n_bits): value for n_bits, value in row.items()} for name, row in table.items()}
