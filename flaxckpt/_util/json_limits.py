"""Limits on JSON, because small JSON text can need much memory in Python."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Mapping
from typing import Any

from flaxckpt._types import JSON

MAX_CONTAINERS = 2**22
"""A container takes at least 60 bytes."""

MAX_VALUES = 2**23
"""A value takes up to 36 bytes, strings more."""

MAX_STRINGS = 7 * 2**19
"""Keys and values take up to 200 bytes each; strings inside strings do not count."""

MAX_DEPTH = 64
"""The deepest nesting that is written; Python parses a few hundred levels."""

_MAX_INT_BITS = 2**13
"""Python parses every int of this size; its limit is 4,300 digits."""

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""A surrogate pair, which JSON cannot distinguish from the character."""


def copy(value: Mapping[str, Any], at: str, depth: int = 0) -> dict[str, JSON]:
    """Returns a deep copy of a mapping in JSON types; tuples become lists.

    Scalars of numpy, and arrays of no axes, become Python numbers. `at` is the name of
    the mapping in messages, and `depth` the number of containers around it. Raises
    ValueError if JSON would not return an equal value.
    """
    copied: dict[str, JSON] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ValueError(f"{at} has the key {key!r:.80}, which is not a str")
        copied[check_text(key, at)] = _copy(item, f"{at}[{key!r:.80}]", depth + 1)
    if len(copied) < len(value):
        raise ValueError(f"{at} has two keys with the same text")
    return copied


def _copy(value: Any, at: str, depth: int) -> JSON:
    if depth > MAX_DEPTH:
        raise ValueError(
            f"{at[:80]} … is nested more than {MAX_DEPTH} deep, or contains itself"
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        if value.bit_length() > _MAX_INT_BITS:
            raise ValueError(f"{at} is an int of more than {_MAX_INT_BITS} bits")
        return int(value)
    if isinstance(value, str):
        return check_text(value, at)
    if isinstance(value, list | tuple):
        return [_copy(item, f"{at}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return copy(value, at, depth)
    cls = type(value)
    fault = f"{at} is a {cls.__module__}.{cls.__qualname__}"
    if advice := advise_on_generator(value):
        raise ValueError(f"{fault}: {advice}")
    shape = getattr(value, "shape", None)
    if shape != () or not hasattr(value, "item"):
        advice = ": write .tolist() of it, or save it in the state" if shape else ""
        raise ValueError(fault + advice)
    number = value.item()  # of a scalar of numpy, or an array of no axes
    if not isinstance(number, bool | int | float):
        raise ValueError(fault)
    return _copy(number, at, depth)


def advise_on_generator(value: Any) -> str:
    """Returns how to save a random generator of NumPy or Python; empty for others."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return (
            "save its getstate() in metadata=, and after a load pass its three items to"
            " setstate, as (version, tuple(internal), gauss)"
        )
    numpy_random: Any = sys.modules.get("numpy.random")  # metadata need no numpy
    if numpy_random is None:
        return ""
    if isinstance(value, numpy_random.Generator):
        name, state = "bit_generator.state", value.bit_generator.state
        restore = "assign it"
    elif isinstance(value, numpy_random.BitGenerator):
        name, state, restore = "state", value.state, "assign it"
    elif isinstance(value, numpy_random.SeedSequence):
        name, state, restore = "state", value.state, "write SeedSequence(**state)"
    elif isinstance(value, numpy_random.RandomState):
        name, state = "get_state(legacy=False)", value.get_state(legacy=False)
        restore = "pass it to set_state"
    else:
        return ""
    place = "in metadata="
    try:
        copy({name: state}, "it")
    except ValueError:  # of MT19937, Philox and SFC64: it has arrays
        place = "as leaves, not in metadata="
    return f"save its {name} {place}, and after a load {restore}"


def check_text(value: str, at: str) -> str:
    """Returns a plain string, also of an Enum; raises ValueError if JSON changes it."""
    plain = str.__str__(value)
    if not plain.isascii() and _PAIR.search(plain):
        raise ValueError(f"{at} has a text with a surrogate pair")
    return plain


def check(text: bytes, *, max_containers: int = MAX_CONTAINERS) -> None:
    """Raises ValueError for JSON too large to parse safely."""
    if text.count(b"[") + text.count(b"{") > max_containers:
        raise ValueError("it has too many containers")
    if text.count(b",") > MAX_VALUES:
        raise ValueError("it has too many values")
    if (text.count(b'"') - text.count(b'\\"')) // 2 > MAX_STRINGS:
        raise ValueError("it has too many strings")


def loads(content: bytes) -> Any:
    """Parses JSON of others; raises ValueError and RecursionError."""
    check(content)
    return json.loads(content, object_pairs_hook=refuse_duplicates)


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object for `json.loads`; raises ValueError if a key occurs twice."""
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("it has the same key twice")
    return data
