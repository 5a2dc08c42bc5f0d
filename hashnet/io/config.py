"""Configurations: frozen dataclasses filled from a YAML file plus ``key=value`` overrides.

    @dataclass(frozen=True)
    class TrainConfig:
        n_bits: int = key(48, "code length", check=check_n_bits)
        methods: list[str] = key(["all"], "comma-separated on the command line")
        run: str = key(REQUIRED, "run folder: an absolute path or a URI")

        def __post_init__(self):            # rules across keys raise ConfigError
            ...

All mistakes are reported together, an unknown key with the nearest known one, and ``describe`` lists
each key with type, default and meaning.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from hashnet.errors import ConfigError, HashnetError
from hashnet.io import storage

C = TypeVar("C")
SEAL = b"# sha256 of the lines below: "


class _Required:
    def __repr__(self) -> str:
        return "(required)"


REQUIRED: Any = _Required()


def key(
    default: Any,
    meaning: str,
    *,
    choices: Iterable[Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    check: Callable[[Any], Any] | None = None,
    path: bool | tuple[str, ...] = False,
) -> Any:
    """A dataclass field with its meaning and its bounds; ``default=REQUIRED`` must be given.

    ``path``: the value is a file or folder (or one of these words), see ``with_absolute_paths``.
    """
    metadata = {
        "meaning": meaning,
        "choices": tuple(choices) if choices is not None else None,
        "low": low,
        "high": high,
        "check": check,
        "path": path,
    }
    if isinstance(default, (list, dict)):
        frozen = default
        return dataclasses.field(default_factory=lambda: type(frozen)(frozen), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def paths(settings: Any) -> dict[str, Any]:
    """The files and folders among the settings, by key; a key whose value is a word is left out."""
    found = {}
    for field in dataclasses.fields(settings):
        value, words = getattr(settings, field.name), field.metadata.get("path")
        plain = (field.default, "none", *(words if isinstance(words, tuple) else ()))
        if words and value and value not in plain:
            found[field.name] = value
    return found


def with_absolute_paths(settings: C) -> C:
    """The same settings with relative paths made absolute: workers may run in another folder."""
    changed = {
        name: [storage.absolute(one) for one in value] if isinstance(value, list) else storage.absolute(value)
        for name, value in paths(settings).items()
    }
    return dataclasses.replace(settings, **changed) if changed else settings  # type: ignore[type-var]


@dataclasses.dataclass(frozen=True)
class Renamed:
    """The new name of a key: the values of a configuration's ``RENAMED``, by old name.

    ``values`` maps old values to new ones; what it does not list keeps its value. A user who gives the
    old key gets an error with the new one; a file that an older version saved is still read.
    """

    key: str
    values: Mapping[Any, Any] = dataclasses.field(default_factory=dict)

    def value_of(self, old: Any) -> Any:
        return self.values.get(old, old)


def load(
    cls: type[C], config_file: str | None = None, overrides: Iterable[str] = (), *, saved: bool = False
) -> C:
    """An instance of ``cls`` from a YAML file and ``key=value`` words; later ones win.

    Raises ConfigError with every mistake found. ``saved`` says that the file was written by ``save``,
    perhaps by an older version: its renamed keys are translated.
    """
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    if config_file is not None:
        values.update(_read_yaml(config_file, mistakes, saved))
        if saved:
            values = _translated(cls, values)
    for word in overrides:
        name, equals, text = word.partition("=")
        if not equals:
            mistakes.append(f"{word!r} is not key=value (every setting is; --help lists the keys)")
            continue
        values[name.strip()] = _Text(text)
    return _fill(cls, values, mistakes)


def from_dict(cls: type[C], values: dict[str, Any]) -> C:
    """An instance of ``cls`` from plain values, checked like a file's."""
    return _fill(cls, dict(values), [])


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved values as plain JSON-able types."""
    return dataclasses.asdict(config)


def save(config: Any, uri: str) -> None:
    """Writes the resolved configuration as YAML, each key with its value."""
    import yaml  # not where only keys are declared, as in a client

    text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True).encode()
    storage.write_bytes(uri, SEAL + hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def check_saved(uri: str) -> None:
    """ConfigError where the file that ``save`` wrote is damaged; its keys are not looked at."""
    mistakes: list[str] = []
    _read_yaml(uri, mistakes, saved=True)
    if mistakes:
        raise ConfigError(mistakes)


def describe(cls: type) -> str:
    """One line per key: name, type, default, meaning."""
    hints = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        default = _default(field)
        shown = repr(default) if default is REQUIRED else _as_text(default)
        meaning = field.metadata.get("meaning", "")
        if field.metadata.get("choices"):
            meaning += f" [{' | '.join(_as_text(c) for c in field.metadata['choices'])}]"
        rows.append((field.name, _type_name(hints[field.name]), shown, meaning))
    if not rows:
        return "(no keys)"
    widths = [min(max(len(row[i]) for row in rows), 28) for i in range(3)]
    return "\n".join(
        "  " + "  ".join(row[i].ljust(widths[i]) for i in range(3)) + "  " + row[3] for row in rows
    )


class _Text(str):
    """A value from the command line: still text, read by the type of its key."""


def _read_yaml(uri: str, mistakes: list[str], saved: bool) -> dict[str, Any]:
    import yaml

    try:
        data = storage.read_bytes(uri)
        seal, _, content = data.partition(b"\n")  # older saved files have no seal
        if saved and seal.startswith(SEAL) and seal != SEAL + hashlib.sha256(content).hexdigest().encode():
            mistakes.append(
                f"{uri} was changed or damaged after it was written: its sha256 does not fit its content; "
                "restore it, or delete its first line if the change is yours"
            )
            return {}
        values = yaml.safe_load(data.decode()) or {}
        if saved and not values:
            mistakes.append(f"{uri} is empty; restore it")
    except HashnetError as error:
        mistakes.append(f"cannot read the configuration {uri}: {error}")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mistakes.append(f"{uri} is not YAML: {' '.join(str(error).split())}")
        return {}
    if not isinstance(values, dict):
        mistakes.append(f"{uri} must hold key: value lines, got {type(values).__name__}")
        return {}
    return {str(name): value for name, value in values.items()}


def _fill(cls: type[C], values: dict[str, Any], mistakes: list[str]) -> C:
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            if moved := _renamed(cls).get(name):
                mistakes.append(_now_called(name, value, moved))
                continue
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "--help lists the keys"
            mistakes.append(f"unknown key {name!r}; {hint}")
            continue
        try:
            converted = _convert(hints[name], value)
            arguments[name] = _bounded(fields[name], converted)
        except (ValueError, TypeError) as error:
            mistake = f"{name}: {error}" if name not in str(error) else str(error)
            if value == "auto" and type(None) in typing.get_args(hints[name]):
                mistake += f"; leave it out or write {name}=none"
            mistakes.append(mistake)
    for name, field in fields.items():
        if name not in values and _default(field) is REQUIRED:
            mistakes.append(f"{name} is required: {field.metadata['meaning']}")
    if mistakes:
        raise ConfigError(mistakes)
    return cls(**arguments)


def _renamed(cls: type) -> Mapping[str, Renamed]:
    return getattr(cls, "RENAMED", {})


def _translated(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """``values`` of a saved configuration under today's keys; a key given under both names keeps the new."""
    moved = _renamed(cls)
    new = {moved[name].key: moved[name].value_of(value) for name, value in values.items() if name in moved}
    return new | {name: value for name, value in values.items() if name not in moved}


def _now_called(name: str, value: Any, moved: Renamed) -> str:
    """A sentence that says what to write in place of an old key."""
    words = {_as_text(old): new for old, new in moved.values.items()}
    given = str(value) if isinstance(value, str) else _as_text(value)
    instead = _as_text(words[given]) if given in words else given
    return f"{name} is now called {moved.key}: write {moved.key}={instead}"


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


def _bounded(field: dataclasses.Field, value: Any) -> Any:
    about = field.metadata
    for item in value if isinstance(value, list) else [value]:
        if item is None:
            continue
        if about.get("choices") and item not in about["choices"]:
            choices = [str(choice) for choice in about["choices"]]
            near = difflib.get_close_matches(str(item), choices, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"must be one of {', '.join(choices)}, got {item!r}{hint}")
        if about.get("low") is not None and not item >= about["low"]:
            raise ValueError(f"must be at least {about['low']}, got {item}")
        if about.get("high") is not None and not item <= about["high"]:
            raise ValueError(f"must be at most {about['high']}, got {item}")
        if about.get("check"):
            about["check"](item)
    return value


def _convert(hint: Any, value: Any) -> Any:
    """``value`` as the type ``hint`` says, or ValueError; text from the command line is read."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, _Text) and value in ("none", "null")):
            if type(None) in arguments:
                return None
            raise ValueError(f"must be {_type_name(hint)}, got {value!r}")
        options = [a for a in arguments if a is not type(None)]
        for option in options:
            try:
                return _convert(option, value)
            except ValueError:
                continue
        raise ValueError(f"must be {_type_name(hint)}, got {_shown(value)}")
    if origin is list:
        items = value.split(",") if isinstance(value, _Text) else value
        if isinstance(items, _Text):
            items = [items]
        if not isinstance(items, (list, tuple)):
            items = [items]
        return [_convert(arguments[0], _Text(i) if isinstance(value, _Text) else i) for i in items if i != ""]
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, _Text) and value.lower() in ("true", "yes", "1", "false", "no", "0"):
            return value.lower() in ("true", "yes", "1")
        raise ValueError(f"must be true or false, got {_shown(value)}")
    if hint is int:
        return _read_whole(value)
    if hint is float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"must be a finite number, got {_shown(value)}")
        return number
    if hint is str:
        if isinstance(value, (dict, list)) or value is None:
            raise ValueError(f"must be text, got {_shown(value)}")
        return str(value)
    return value


def _read_whole(value: Any) -> int:
    if _is_whole(value):
        return int(value)
    if isinstance(value, str):
        try:
            return int(value.replace("_", ""))
        except ValueError:
            pass
    raise ValueError(f"must be a whole number, got {_shown(value)}")


def _shown(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)


def _as_text(value: Any) -> str:
    """A default as a person would type it after ``key=``."""
    if isinstance(value, list):
        return ",".join(_as_text(item) for item in value) or "(empty)"
    if isinstance(value, str):
        return value or "(empty)"
    return "none" if value is None else json.dumps(value)


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join("none" if a is type(None) else _type_name(a) for a in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    return {int: "whole number", float: "number", str: "text", bool: "true/false"}.get(hint, str(hint))


def check_whole(name: str, value: Any, low: int, error: type[HashnetError] = ConfigError) -> int:
    """An argument as an int, also a numpy one; ``error`` unless it is a whole number of at least ``low``."""
    if not _is_whole(value) or value < low:
        raise error(f"{name} must be a whole number of at least {low}, got {value!r}")
    return int(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
