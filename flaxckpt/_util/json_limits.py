"""How much JSON is written and parsed: small as text, it may be large in Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flaxckpt._types import JSON

MAX_CONTAINERS = 2**22
"""Each takes 60 bytes or more."""

MAX_VALUES = 2**23
"""Each takes up to 36 bytes, and strings more."""

MAX_STRINGS = 7 * 2**19
"""Keys and values; each takes up to 200 bytes, and none within others counts."""

MAX_DEPTH = 64
"""Containers in one another that are written; Python parses a few hundred."""

_MAX_INT_BITS = 2**13
"""Of which Python parses all; 4,300 digits are its limit."""

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""Two halves of a character, which JSON cannot tell from the character."""


def copied(value: Mapping[str, Any], at: str) -> dict[str, JSON]:
    """A deep copy of a mapping in JSON's own types; tuples become lists.

    Args:
        value: Of a user, who may change it afterwards.
        at: What it is called, for messages: `metadata`.

    Raises:
        ValueError: It would not come back equal; the message says what, and where.
    """
    return _copied_dict(value, at, 0)


def _copied(value: Any, at: str, depth: int) -> JSON:
    if depth > MAX_DEPTH:
        raise ValueError(
            f"{at[:80]} … is nested more than {MAX_DEPTH} deep, or holds itself"
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
        return text(value, at)
    if isinstance(value, list | tuple):
        return [_copied(item, f"{at}[{i}]", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        cls = type(value)
        raise ValueError(f"{at} is a {cls.__module__}.{cls.__qualname__}")
    return _copied_dict(value, at, depth)


def _copied_dict(value: Mapping[str, Any], at: str, depth: int) -> dict[str, JSON]:
    made: dict[str, JSON] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ValueError(f"{at} has the key {key!r:.80}, which is no str")
        made[text(key, at)] = _copied(item, f"{at}[{key!r:.80}]", depth + 1)
    if len(made) < len(value):
        raise ValueError(f"{at} has two keys of the same text")
    return made


def text(value: str, at: str) -> str:
    """A string as a plain `str`; of an Enum, its value.

    Raises:
        ValueError: JSON would give back another one; the message says where.
    """
    plain = str.__str__(value)
    if not plain.isascii() and _PAIR.search(plain):
        raise ValueError(f"{at} has a text with two halves of a character in it")
    return plain


def check(text: bytes, *, max_containers: int = MAX_CONTAINERS) -> None:
    """Refuses what would take absurd amounts of memory, before it is parsed.

    Raises:
        ValueError: It would.
    """
    if text.count(b"[") + text.count(b"{") > max_containers:
        raise ValueError("it has too many containers")
    if text.count(b",") > MAX_VALUES:
        raise ValueError("it has too many values")
    if (text.count(b'"') - text.count(b'\\"')) // 2 > MAX_STRINGS:
        raise ValueError("it has too many strings")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, for `json.loads`, that has each of its keys once.

    Raises:
        ValueError: One is there twice: others may take the other value.
    """
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("it has the same key twice")
    return data
