"""The configuration of a published model: `config.json`, and sizes derived from it."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from flaxckpt import _formats, _storage, _util, errors
from flaxckpt._formats import hub_cache
from flaxckpt._types import JSON, PathLike

NAME = "config.json"

QUANTIZATION = "quantization_config"
"""The key that configurations of quantized models have."""

_MAX_BYTES = 2**24

Config: TypeAlias = "Mapping[str, Any] | PathLike | Any"
"""A configuration: a dict, the path of a `config.json` or of its directory, or a
configuration of transformers, which has a method `to_dict`."""


def read_config(config: Config) -> dict[str, JSON]:
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
        file = (hub_cache.find_snapshot(path) or path) / NAME
    if not file.is_file():
        raise errors.CheckpointNotFoundError(
            f"there is no {NAME} at {path}: pass the path of one, or its content"
        )
    if path.is_dir():
        hub_cache.check_link(file)
    elif (detected := _formats.identify(file)) is not None:
        advice = (
            "maps.detect(path).config is the configuration in it"
            if detected.format == "gguf"
            else f"pass the path of its {NAME}, or of their directory"
        )
        raise errors.OptionError(
            f"{file} is a checkpoint, not a configuration ({detected}): {advice}"
        )
    try:
        content = _storage.of(file).read(file, max_bytes=_MAX_BYTES)
        data = _util.json_limits.loads(content)
    except (ValueError, RecursionError) as error:
        raise errors.CheckpointFormatError(
            f"{file} is not a configuration: {errors.one_line(error)}"
        ) from None
    if not isinstance(data, dict):
        raise errors.CheckpointFormatError(f"{file} is not a JSON object")
    return data


def look_up(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key, or None; a dotted key looks into nested dicts."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def describe_quantization(config: Mapping[str, Any]) -> str | None:
    """Returns the entry of a configuration for quantized arrays; None without one."""
    if config.get(QUANTIZATION) is None:
        return None
    method = look_up(config, f"{QUANTIZATION}.quant_method")
    return QUANTIZATION if method is None else f"{QUANTIZATION} of {method!r:.40}"


def check_not_quantized(config: Mapping[str, Any]) -> None:
    """Raises OptionError if a configuration is that of a quantized model."""
    if (entry := describe_quantization(config)) is not None:
        raise errors.OptionError(
            f"the config has a {entry}: its arrays are parts of weights, such as values"
            " without their scales, and no map computes the weights. Take the model"
            " before its quantization, or dequantize it with"
            " transforms.dequantize before the map, or with transformers; if its"
            f" arrays are not quantized, remove {QUANTIZATION} from the config"
        )


def with_old_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with the keys of transformers 4 for rotary embeddings.

    transformers 5 calls `rope_scaling` `rope_parameters`, and versions before 4.43 call
    the key `rope_type` in it `type`. Raises OptionError if two keys disagree.
    """
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        for name in ("rope_type", "type"):
            kind = look_up(config, f"{key}.{name}")
            if kind is not None:
                found[f"{key}.{name}"] = kind
    if not found:
        return dict(config)
    if len(set(map(str, found.values()))) > 1:
        listed = " and ".join(f"{key} {kind!r:.40}" for key, kind in found.items())
        raise errors.OptionError(f"the config contradicts itself: it has {listed}")
    kind = next(iter(found.values()))
    scaling = config.get("rope_scaling") or config["rope_parameters"]
    return {**config, "rope_scaling": {**scaling, "rope_type": kind}}


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with other values of keys, dotted as in `look_up`."""
    changed = dict(config)
    for key, value in values.items():
        first, _, rest = key.partition(".")
        changed[first] = with_values(changed[first], {rest: value}) if rest else value
    return changed


def holds(config: Mapping[str, Any], condition: str) -> bool:
    """Returns True if a condition on a configuration holds.

    It is `key` for a true value, `key=pattern` with wildcards as in file names, or
    `key==key` for equal values; with `not` before it for the opposite; several
    conditions joined by `and`. Always true if empty.
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


def find_fault(config: Mapping[str, Any], condition: str) -> tuple[str, str]:
    """Returns the first part of a condition that fails, and its key."""
    part = next(c for c in condition.split(" and ") if not _holds(config, c))
    return part, part.removeprefix("not ").partition("=")[0]


def find_class(config: Mapping[str, Any]) -> str:
    """Returns the class of the model; empty if the configuration does not say it."""
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list | tuple) and listed else ""


_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "*": operator.mul,
    "/": operator.floordiv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def find_size(config: Mapping[str, Any], rule: str | int) -> int | None:
    """Returns a size that a configuration implies; None if keys are missing.

    The rule is a size, or keys: `a|b` is `a` if present, else `b`. Keys and numbers can
    be joined by `*`, `//`, `%` and `/`, an exact quotient, which are evaluated from
    left to right: `layers//6*6`. Raises OptionError if a value is not a positive
    integer, or a quotient is not exact.
    """
    if isinstance(rule, int):
        return rule
    chosen = choose(config, rule)
    if chosen is None:
        return None
    keys, operators = _parse(chosen)
    values = [int(key) if key.isdigit() else look_up(config, key) for key in keys]
    return _evaluate(keys, operators, values)


def choose(config: Mapping[str, Any], rule: str) -> str | None:
    """Returns the first choice of a rule whose keys are all present; None without."""
    for choice in rule.split("|"):
        keys, _ = _parse(choice)
        if all(key.isdigit() or look_up(config, key) is not None for key in keys):
            return choice
    return None


def _parse(choice: str) -> tuple[list[str], list[str]]:
    """Returns the keys and numbers of a choice, and the operators between them."""
    tokens = re.split(r"(//|[/*%])", choice)
    return tokens[::2], tokens[1::2]


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
