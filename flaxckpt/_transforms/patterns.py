"""Patterns on leaf paths, replacements, and their inverses."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from flaxckpt import _util, errors
from flaxckpt._types import LeafPath

INDEX = "{i}"
"""The placeholder for the number of a part in a replacement."""

_NEAREST_AMONG = 5_000
"""The most leaf paths among which to look for a similar one."""


def _shown(value: object) -> str:
    is_short = isinstance(value, list | tuple)
    return f"{value!r:.80}" if is_short else _util.arguments.describe(value)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern on whole leaf paths."""
    if not isinstance(pattern, str):
        raise errors.OptionError(
            f"a pattern must be a regular expression as a str, got {_shown(pattern)}"
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise errors.OptionError(
            f"{pattern!r} is not a valid regular expression: {error}"
        ) from None


def check_replacement(pattern: str, replacement: str) -> str:
    """Returns `replacement` if it is a str, or raises OptionError."""
    if not isinstance(replacement, str):
        raise errors.OptionError(
            f"the replacement of {pattern!r} must be a path as a str, got"
            f" {_util.arguments.describe(replacement)}"
        )
    return replacement


def expand(match: re.Match[str], replacement: str) -> LeafPath:
    """Returns `replacement` with the groups of a match, or raises OptionError."""
    try:
        return match.expand(replacement)
    except (re.error, IndexError) as error:
        raise errors.OptionError(
            f"{replacement!r} does not fit the pattern {match.re.pattern!r}: {error}"
        ) from None


def no_match(pattern: str, paths: Collection[str]) -> errors.OptionError:
    """Returns an error for a pattern without matches, with the nearest paths."""
    return errors.OptionError(
        f"the pattern {pattern!r} matches no leaf (it must match a whole leaf path)"
        + name_nearest(_plain(pattern), paths, most=3, cutoff=0.3)
    )


def name_nearest(
    path: str, paths: Collection[str], *, most: int = 2, cutoff: float = 0.7
) -> str:
    """Returns the end of a message, with similar paths; empty if none is found."""
    near: list[str] = []
    if len(paths) <= _NEAREST_AMONG:
        near = difflib.get_close_matches(path, paths, most, cutoff)
    return f"; the nearest are {', '.join(near)}" if near else ""


def _plain(pattern: str) -> str:
    return re.sub(r"\\[A-Za-z]|[\\()\[\]*+?^$|{}]", "", pattern)


# ---- inverting --------------------------------------------------------------------


class _Group(NamedTuple):
    """A group of a pattern; without `source`, a reference in a replacement."""

    name: str
    source: str = ""


def invert(pattern: str, replacement: str) -> tuple[str, str]:
    """Returns the inverse pattern and replacement; `{i}` and a group `i` are inverse.

    Raises OptionError if the text that `pattern` matched is not unique.
    """
    parts = list(_pattern_parts(pattern))
    groups = {part.name: part for part in parts if isinstance(part, _Group)}
    wanted = list(_replacement_parts(replacement))
    used = [part.name for part in wanted if isinstance(part, _Group)]
    lost = [name for name in groups if name not in used and name != "i"]
    if len(set(used)) < len(used) or lost or not set(used) <= {*groups, "i"}:
        raise _cannot_invert(
            pattern, f"{replacement!r} does not use each group exactly once"
        )
    number = {name: str(i + 1) for i, name in enumerate(used)}
    inverse = "".join(
        re.escape(part) if isinstance(part, str) else _group(part.name, groups)
        for part in wanted
    )
    back = "".join(
        part.replace("\\", r"\\")
        if isinstance(part, str)
        else rf"\g<{number[part.name]}>"
        if part.name in number
        else INDEX
        for part in parts
    )
    return inverse, back


def _group(name: str, groups: dict[str, _Group]) -> str:
    source = groups[name].source if name in groups else "[0-9]+"
    return f"(?P<i>{source})" if name == "i" else f"({source})"


def _cannot_invert(pattern: str, why: str) -> errors.OptionError:
    return errors.OptionError(
        f"{pattern!r} cannot be inverted: {why}. Escape dots, keep to plain text and"
        " groups, or write the inverse yourself."
    )


_NAMED = re.compile(r"\?P<(\w+)>")
_REFERENCE = re.compile(r"\\g<(\w+)>|\\([1-9][0-9]?)|(\{i\})|\\(.)|(.)", re.DOTALL)


def _pattern_parts(pattern: str) -> Iterator[str | _Group]:
    """Yields the plain text and groups of a pattern; rejects other syntax."""
    i = count = 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\" and i + 1 < len(pattern) and not pattern[i + 1].isalnum():
            yield pattern[i + 1]
            i += 2
        elif char == "(":
            end = _group_end(pattern, i)
            source, name = pattern[i + 1 : end], ""
            count += 1
            if named := _NAMED.match(source):
                name, source = named[1], source[named.end() :]
            if source.startswith("?") or re.compile(source).groups:
                raise _cannot_invert(pattern, f"({source}) contains another group")
            if pattern[end + 1 : end + 2] in {"*", "+", "?", "{"}:
                raise _cannot_invert(pattern, f"({source}) is repeated")
            yield _Group(name or str(count), source)
            i = end + 1
        elif char in r"\.^$*+?{}[]|)":
            raise _cannot_invert(
                pattern, f"{char!r} outside of a group matches more than one text"
            )
        else:
            yield char
            i += 1


def _group_end(pattern: str, start: int) -> int:
    depth, in_class, i = 0, False, start
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 1
        elif in_class:
            in_class = char != "]" or pattern[i - 1] == "["
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return i
        i += 1
    raise _cannot_invert(pattern, "a group is not closed")


def _replacement_parts(replacement: str) -> Iterator[str | _Group]:
    """Yields the plain text, group references and `{i}` of a replacement."""
    for name, number, index, escaped, plain in _REFERENCE.findall(replacement):
        if name or number:
            yield _Group(name or number)
        elif index:
            yield _Group("i")
        else:
            yield escaped or plain


def name_index(pattern: str) -> str:
    """Returns the pattern with its first group named `i`, unless another is."""
    if "(?P<i>" in pattern:
        return pattern
    i = 0
    while i < len(pattern) and pattern[i] != "(":
        i += 2 if pattern[i] == "\\" else 1
    if pattern[i : i + 2] in ("", "(?"):
        raise errors.OptionError(
            f"{pattern!r} needs a group for the number of a part, as in"
            r" 'params/layers_(\d+)/(.*)'"
        )
    return f"{pattern[:i]}(?P<i>{pattern[i + 1 :]}"  # groups keep their numbers
