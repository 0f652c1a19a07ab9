"""How much JSON is parsed: as text it is small, as Python has it, it need not be."""

from __future__ import annotations

from typing import Any

MAX_CONTAINERS = 2**22
"""Each takes 60 bytes or more."""

MAX_VALUES = 2**23
"""Each takes up to 36 bytes, and strings more."""

MAX_STRINGS = 7 * 2**19
"""Keys and values; each takes up to 200 bytes, and none within others counts."""


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
