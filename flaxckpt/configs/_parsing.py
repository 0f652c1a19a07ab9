"""Parses options from files: strings, numbers and tables.

A parser takes an option's full name, such as `layout.codec`, and the raw value. It
returns the parsed value, or raises an `OptionError` with the expected and actual
values.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import operator
import os
import re
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from flaxckpt import _storage, errors

Parser = Callable[[str, Any], Any]

BYTES = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
SECS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}

# ---- strings and numbers -------------------------------------------------------------


def _type_error(key: str, wanted: str, found: Any) -> errors.OptionError:
    kind = type(found).__name__
    return errors.OptionError(f"{key} must be {wanted}, found {found!r:.80} ({kind})")


def boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _type_error(key, "true or false", value)
    return value


def text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _type_error(key, "a nonempty string", value)
    return value


def path(key: str, value: Any) -> str:
    try:
        return text(key, os.fspath(value))
    except TypeError:
        raise _type_error(key, "a path", value) from None


def whole(smallest: int) -> Parser:
    def parse(key: str, value: Any) -> int:
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None or number < smallest:
            raise _type_error(key, f"a whole number of at least {smallest}", value)
        return number

    return parse


def _amount(key: str, value: Any, units: Mapping[str, int], example: str) -> float:
    """Parses a positive number, or a string of a number and a unit."""
    number, unit = value, ""
    if isinstance(value, str):
        parts = re.fullmatch(r"([\d.]+(?:e\+?\d+)?) *([A-Za-z]*)", value)
        number, unit = parts.groups() if parts else (None, "")
    try:
        amount = None if isinstance(number, bool) else float(number)
    except (TypeError, ValueError):
        amount = None
    if amount is None or unit not in units or not 0 < amount < math.inf:
        raise _type_error(
            key, f"a positive number, or a string such as {example!r}", value
        )
    return amount * units[unit]


def secs(key: str, value: Any) -> float:
    """Parses seconds, also from a string like "15 min"."""
    return _amount(key, value, SECS, "15 min")


def fraction(key: str, value: Any) -> float:
    """Parses a number between 0 and 1, exclusive."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _type_error(key, "a number", value)
    if not 0 < value < 1:
        raise errors.OptionError(f"{key} must be between 0 and 1, got {value!r}")
    return float(value)


def bytes_(key: str, value: Any) -> int:
    """Parses bytes, also from a string like "64 MiB"."""
    amount = _amount(key, value, BYTES, "64 MiB")
    if not amount.is_integer():
        raise _type_error(key, "a whole number of bytes", value)
    return int(amount)


def mode(key: str, value: Any) -> int | None:
    """Parses a mode of directories, also from octal digits: "0o750", "750"."""
    if isinstance(value, str):
        digits = re.fullmatch("(?:0o?)?([0-7]{3})", value)
        if digits is None:
            raise _type_error(key, 'a mode, such as "0o750"', value)
        value = int(digits[1], 8)
    return _storage.modes.check(value)


def one_of(*choices: Any) -> Parser:
    """Returns a parser of the given values, strict in types: 1 is not True."""

    def parse(key: str, value: Any) -> Any:
        if not any(
            value == choice and type(value) is type(choice) for choice in choices
        ):
            raise _type_error(key, f"one of {', '.join(map(repr, choices))}", value)
        return value

    return parse


def optional(parse: Parser, *, none: str | None = None) -> Parser:
    """Returns a parser of None and of the values of `parse`.

    `none` stands for None in files without null.
    """

    def parse_some(key: str, value: Any) -> Any:
        if value is None or (none is not None and value == none):
            return None
        return parse(key, value)

    return parse_some


def each(parse: Parser) -> Parser:
    """Returns a parser of lists, as tuples."""

    def parse_all(key: str, value: Any) -> tuple[Any, ...]:
        is_list = isinstance(value, Collection) and not hasattr(value, "items")
        if not is_list or isinstance(value, str | bytes):
            raise _type_error(key, "a list", value)
        return tuple(parse(f"{key}[{i}]", item) for i, item in enumerate(value))

    return parse_all


def _to_mapping(key: str, value: Any) -> Mapping[str, Any]:
    # ConfigDicts of ml_collections are not mappings.
    to_dict = getattr(value, "to_dict", None)
    mapping = to_dict() if to_dict else value
    if not isinstance(mapping, Mapping):
        raise _type_error(key, "a table", value)
    return mapping


def by_name(parse: Parser) -> Parser:
    """Returns a parser of tables with any names, as dicts."""

    def parse_all(key: str, value: Any) -> dict[str, Any]:
        return {
            text(key, name): parse(f"{key}.{name}", item)
            for name, item in _to_mapping(key, value).items()
        }

    return parse_all


def steps(key: str, value: Any) -> tuple[int, ...]:
    return tuple(sorted(set(each(whole(0))(key, value))))


def axes(key: str, value: Any) -> int | tuple[int, ...]:
    """Parses an axis or a list of axes; negative axes count from the last."""

    def axis(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _type_error(key, "an axis, such as 0 or -1", value)
        return value

    is_list = isinstance(value, Collection) and not isinstance(value, str | bytes)
    return each(axis)(key, value) if is_list else axis(key, value)


# ---- by types ------------------------------------------------------------------------

_PARSERS: Mapping[Any, Parser] = {
    bool: boolean,
    int: whole(1),
    float: secs,
    str: text,
    Collection[int]: steps,
}
"""Type of an option -> its parser; an `int` is at least 1, a `float` is seconds."""


def raw_value(kind: Any, text: str) -> Any:
    """Returns the value that `text` stands for in a file: `[1, 10]` for `1,10`.

    Raises ValueError if it is no number where `kind` wants a whole number.
    """
    if typing.get_origin(kind) is Collection:
        (inner,) = typing.get_args(kind)
        return [raw_value(inner, part) for part in text.split(",")]
    return int(text) if kind is int else text


def by_type(kind: Any) -> Parser:
    kinds = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return one_of(*kinds)
    if NoneType in kinds:
        [kind] = {*kinds} - {NoneType}
        return optional(by_type(kind))
    return _PARSERS[kind]


def by_field(cls: type[Any], **given: Parser) -> dict[str, Parser]:
    """Returns the parser of each field of a dataclass: `given`, or by its type."""
    kinds = typing.get_type_hints(cls)
    return {
        name: given[name] if name in given else by_type(kinds[name])
        for name in names(cls)
    }


# ---- tables --------------------------------------------------------------------------


def table(
    key: str,
    value: Any,
    names: Iterable[str],
    *,
    answer: Callable[[str], str | None] = lambda name: None,
) -> dict[str, Any]:
    """Parses a mapping as a dict; rejects keys other than `names`.

    `key` is the full name of the table; empty for the whole config. `answer` returns
    what to write instead of an unknown name, if that is known.
    """
    mapping = _to_mapping(key or "the config", value)
    prefix = f"{key}." if key else ""
    for name in mapping:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
            advice = f"the options are {', '.join(names)}"
            if near:
                advice = f"did you mean {prefix}{near[0]}?"
            advice = answer(name) or advice
            raise errors.OptionError(f"{prefix}{name} is not an option; {advice}")
    return dict(mapping)


def names(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def record(cls: type[Any], parsers: Mapping[str, Parser]) -> Parser:
    def parse(key: str, value: Any) -> Any:
        if isinstance(value, cls):
            return value
        options = table(key, value, parsers)
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in options:
                raise errors.OptionError(f"{key}.{field.name} is missing")
        return create(
            key,
            cls,
            {name: parsers[name](f"{key}.{name}", options[name]) for name in options},
        )

    return parse


def create(key: str, cls: type[Any], fields: Mapping[str, Any]) -> Any:
    """Returns `cls(**fields)`, with the option's name added to errors."""
    try:
        return cls(**fields)
    except errors.OptionError as error:
        raise errors.OptionError(f"{key}: {error}") from None


# ---- files ---------------------------------------------------------------------------


def read(file: Path) -> Any:
    """Reads a TOML, YAML or JSON file, chosen by its suffix."""
    loaders: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".yaml": _load_yaml,
        ".yml": _load_yaml,
        ".json": json.loads,
    }
    if file.suffix not in loaders:
        raise errors.OptionError(
            f"{file} must be a TOML, YAML or JSON file with one of the suffixes"
            f" {', '.join(loaders)}"
        )
    try:
        return loaders[file.suffix](file.read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.OptionError(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        kind = file.suffix[1:].upper()
        raise errors.OptionError(f"{file} is not valid {kind}: {error}") from error


def _load_yaml(content: str) -> Any:
    import yaml  # installed with Flax; few users need it

    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
