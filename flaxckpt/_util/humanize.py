"""Formats sizes, times and counts for people."""

from __future__ import annotations

import time


def size(count: float | None) -> str:
    """Formats a number of bytes, as in `1.49 GB`; `-` for None."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"


def secs(seconds: float) -> str:
    """Formats a short time, as in `1.5 ms`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def when(seconds: float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    """Formats seconds since 1970 in local time; empty for None."""
    if seconds is None:
        return ""
    try:
        return time.strftime(form, time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def number(value: object) -> str:
    """Formats a number with few digits; `-` for None."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else str(value)


TO_THE_SECOND = "%Y-%m-%d %H:%M:%S"
"""A value of `form` for `when`."""


def count(n: int, one: str, many: str | None = None) -> str:
    """Formats a count with a noun: `1 step`, `2 steps`."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
