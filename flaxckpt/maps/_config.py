"""The configuration of a published model: `config.json`, and sizes derived from it."""

from __future__ import annotations

import fnmatch
import json
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from flaxckpt import _storage, _util, errors
from flaxckpt._types import JSON, PathLike
from flaxckpt.formats import _hub_cache

NAME = "config.json"

_MAX_BYTES = 2**24

Config: TypeAlias = "Mapping[str, Any] | PathLike | Any"
"""A configuration: a dict, the path of a `config.json` or of its directory, or a
configuration of transformers, which has a method `to_dict`."""


def read_config(config: Config) -> dict[str, JSON]:
    """Returns a configuration as a dict.

    Args:
        config: A dict, a path of a `config.json` or of its directory, or an object
            with a method `to_dict`.

    Raises:
        OptionError: It is none of these.
        CheckpointNotFoundError: There is no such file.
        CheckpointFormatError: The file is not JSON.
        DamagedCheckpointError: The file of a directory is a link out of it.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if _util.arguments.is_path(config):
        return _read_file(_storage.paths.resolve(config))
    to_dict = getattr(config, "to_dict", None)
    content = to_dict() if callable(to_dict) and not isinstance(config, type) else None
    if isinstance(content, Mapping):
        return dict(content)
    raise errors.OptionError(
        "config must be a dict, the path of a config.json or of its directory, or a"
        f" configuration of transformers, got {_util.arguments.describe(config)}"
    )


def _read_file(path: Path) -> dict[str, JSON]:
    file = path
    if path.is_dir():
        file = (_hub_cache.find_snapshot(path) or path) / NAME
    if not file.is_file():
        raise errors.CheckpointNotFoundError(
            f"there is no {NAME} at {path}: pass the path of one, or its content"
        )
    if path.is_dir():
        _hub_cache.check_link(file)
    try:
        content = _storage.of(file).read(file, max_bytes=_MAX_BYTES)
        _util.json_limits.check(content)
        data = json.loads(
            content, object_pairs_hook=_util.json_limits.refuse_duplicates
        )
    except (ValueError, RecursionError) as error:
        raise errors.CheckpointFormatError(
            f"{file} is not a configuration: {errors.one_line(error)}"
        ) from None
    if not isinstance(data, dict):
        raise errors.CheckpointFormatError(f"{file} is not a JSON object")
    return data


def look_up(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key; a dotted key looks into nested dicts. None if absent.

    Raises:
        OptionError: A part of the key is not a dict.
    """
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def holds(config: Mapping[str, Any], condition: str) -> bool:
    """Returns True if a condition on a configuration holds.

    Args:
        config: The configuration.
        condition: `key` for a true value, `key=pattern` with wildcards as in file
            names, or `key==key` for equal values; with `not` before it for the
            opposite; several conditions joined by `and`. Always true if empty.
    """
    return all(_holds(config, c) for c in condition.split(" and ") if c)


def _holds(config: Mapping[str, Any], condition: str) -> bool:
    key, _, pattern = condition.removeprefix("not ").partition("=")
    value = look_up(config, key)
    if pattern.startswith("="):
        is_true = bool(value == look_up(config, pattern[1:]))
    else:
        is_true = fnmatch.fnmatchcase(str(value), pattern) if pattern else bool(value)
    return is_true != condition.startswith("not ")


_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "*": operator.mul,
    "/": operator.floordiv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def find_size(config: Mapping[str, Any], rule: str | int) -> int | None:
    """Returns a size that a configuration implies; None if keys are missing.

    Args:
        config: The configuration.
        rule: A size, or keys: `a|b` is `a` if present, else `b`. Keys and numbers can
            be joined by `*`, `//`, `%` and `/`, an exact quotient, which are evaluated
            from left to right: `layers//6*6`.

    Raises:
        OptionError: A value is not a positive integer, or a quotient is not exact.
    """
    if isinstance(rule, int):
        return rule
    for choice in rule.split("|"):
        tokens = re.split(r"(//|[/*%])", choice)
        keys = tokens[::2]
        values = [int(key) if key.isdigit() else look_up(config, key) for key in keys]
        if None not in values:
            return _evaluate(keys, tokens[1::2], values)
    return None


def _evaluate(keys: list[str], operators: list[str], values: list[Any]) -> int:
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise errors.OptionError(
                f"{key} of the config must be a positive integer, got {value!r:.80}"
            )
    size: int = values[0]
    for sign, key, value in zip(operators, keys[1:], values[1:], strict=True):
        if sign == "/" and size % value:
            raise errors.OptionError(
                f"{keys[0]} {values[0]} of the config is not divisible by"
                f" {key if key.isdigit() else f'{key} {value}'}"
            )
        size = _OPERATORS[sign](size, value)
    return size
