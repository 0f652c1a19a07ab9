"""Rows of `remap` as renames: the shortest list of patterns that does the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from flaxckpt._suggest.rows import Row
from flaxckpt._types import LeafPath

Rename: TypeAlias = tuple[str, str]
"""The pattern and the replacement of `rename`."""

_MOST = 200
"""The most renames that are shorter than the rows."""

_INDEX = re.compile(r"\{([a-z]+)\}")


def find_renames(
    rows: Sequence[Row],
    sources: Iterable[LeafPath],
    wanted: Mapping[LeafPath, Sequence[LeafPath]],
) -> tuple[Rename, ...]:
    """Returns renames that move the leaves as rows do; empty if no few renames do.

    `wanted` has the sources of each leaf of the state.
    """
    paths = [*sources]
    for renames in (_of_containers(rows), _of_rows(rows)):
        if 0 < len(renames) <= _MOST and _is_equal(renames, paths, wanted):
            return renames
    return ()


def _is_equal(
    renames: Sequence[Rename],
    sources: Sequence[LeafPath],
    wanted: Mapping[LeafPath, Sequence[LeafPath]],
) -> bool:
    """Returns True if each leaf of the state gets its source, and no other one."""
    found: dict[LeafPath, list[LeafPath]] = {}
    for source in sources:
        path = source
        for pattern, replacement in renames:
            if match := re.fullmatch(pattern, path):
                path = match.expand(replacement)
        found.setdefault(path, []).append(source)
    return all(found.get(path, []) == [*origin] for path, origin in wanted.items())


def _of_containers(rows: Sequence[Row]) -> tuple[Rename, ...]:
    """Returns a rename for each container whose leaves have new names above."""
    renames: dict[Rename, None] = {}
    for source, target, *_ in rows:
        old, new = source.split("/"), target.split("/")
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        above, below = "/".join(old), "/".join(new)
        if "{" in above + below or not old or not new:
            return ()
        pattern = rf"{re.escape(above)}/(.*)"
        renames[pattern, rf"{_escape(below)}/\1"] = None
    return tuple(renames)


def _of_rows(rows: Sequence[Row]) -> tuple[Rename, ...]:
    """Returns a rename for each row; none if a row does more than rename."""
    renames = []
    for source, target, *form in rows:
        names, wanted = _INDEX.findall(source), _INDEX.findall(target)
        simple = _INDEX.sub("", source + target)
        if form or "{" in simple or sorted(names) != sorted(wanted):
            return ()
        pattern = "([0-9]+)".join(map(re.escape, _INDEX.split(source)[::2]))
        parts = _INDEX.split(target)
        for at in range(1, len(parts), 2):
            parts[at] = rf"\{names.index(parts[at]) + 1}"
        parts[::2] = map(_escape, parts[::2])
        renames.append((pattern, "".join(parts)))
    return tuple(renames)


def _escape(text: str) -> str:
    return text.replace("\\", r"\\")
