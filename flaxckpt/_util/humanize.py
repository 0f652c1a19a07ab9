"""Formats sizes, times and counts for people."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

_WIDTH = 80
"""Columns of a usual terminal."""


def with_path(path: str, headline: str) -> list[str]:
    """Returns a line with a path and a headline; two lines if it would be too long."""
    whole = f"{path}: {headline}"
    return [whole] if len(whole) <= _WIDTH else [f"{path}:", f"  {headline}"]


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


def clock(seconds: float | None) -> str:
    """Formats seconds since 1970 in local time, without the date if it is today."""
    is_today = when(seconds, "%Y-%m-%d") == time.strftime("%Y-%m-%d")
    return when(seconds, "%H:%M:%S" if is_today else "%Y-%m-%d %H:%M")


def number(value: object, digits: int = 6) -> str:
    """Formats a number with few digits; `-` for None."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else f"{value:.{digits}g}"
    return "-" if value is None else str(value)


_FEWEST_DIGITS, _MOST_DIGITS = 4, 12
"""Significant digits of numbers in a column."""


def same_decimals(values: Sequence[float | None]) -> list[str]:
    """Formats the numbers of a column with the fewest digits that tell them apart.

    Numbers of similar size get equally many decimals, others an exponent; all get 4 to
    12 significant digits, if they have so many. None becomes an empty text.
    """
    finite = {v for v in values if v is not None and math.isfinite(v)}
    largest = max(map(abs, finite), default=0.0)
    kind, digits, most = "g", _FEWEST_DIGITS, _MOST_DIGITS
    if largest < 1e7 and all(abs(v) >= 1e-4 for v in finite if v):
        whole = math.floor(math.log10(largest)) + 1 if largest else 1
        decimals = max([_decimals(f"{v:.{_FEWEST_DIGITS}g}") for v in finite] or [0])
        most -= whole
        kind, digits = "f", min(decimals, max(0, _FEWEST_DIGITS + 2 - whole))
    while len({f"{v:.{digits}{kind}}" for v in finite}) < len(finite) and digits < most:
        digits += 1
    texts = ["" if v is None else f"{v:.{digits}{kind}}" for v in values]
    return ["NaN" if text == "nan" else text for text in texts]


def _decimals(text: str) -> int:
    return len(text.partition(".")[2])


def duration(seconds: float) -> str:
    """Formats the length of a period, as in `24 h`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


def count(n: int, one: str, many: str | None = None) -> str:
    """Formats a count with a noun: `1 step`, `2 steps`."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def rows(lines: Sequence[str], most: int) -> list[str]:
    """Indents the first lines of a list, and says how many more it has."""
    shown = [f"  {line}" for line in lines[:most]]
    more = len(lines) - len(shown)
    return [*shown, f"  … and {more} more"] if more else shown
