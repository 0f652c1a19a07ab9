"""Checks of the names of leaves on disk, for the file system and for Orbax."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from flaxckpt import _arrays, errors
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath
from flaxckpt.formats._native import items

_RESERVED = frozenset(
    (
        items.TREE,
        items.SHARDING,
        items.STRINGS,
        "array_metadatas",
        _arrays.zarr.ocdbt.MANIFEST,
        "d",
    )
)
_MAX_NAME_BYTES = 240
_MAX_DATABASE_NAME_BYTES = 2**15
"""Half of the limit on database keys; a key includes the name of the chunk."""

_SURROGATES = re.compile(r"[\ud800-\udfff]")
_UNSAFE_CHARACTERS = re.compile(r"[/\\\n\0]")


def check(infos: Sequence[LeafInfo], names: Sequence[str], *, ocdbt: bool) -> None:
    """Raises LeafNameError for names that collide on disk or that readers refuse.

    Args:
        infos: The leaves.
        names: The name of each leaf on disk.
        ocdbt: Whether the arrays are in an OCDBT database.

    Raises:
        LeafNameError: Lists all names at fault.
    """
    faults: dict[str, str] = {}
    seen: dict[str, LeafPath] = {}
    strings = []
    for info, name in zip(infos, names, strict=True):
        if name in seen:
            faults[info.path] = f"is called {name!r} on disk, like {seen[name]}"
        seen[name] = info.path
        if info.kind == "string":
            strings.append(name)
        if "\0" in name:
            faults[info.path] = "contains a NUL"
        elif info.kind == "string" and "~" in name:
            faults[info.path] = "is a string leaf with a '~', which Orbax cannot read"
        elif info.chunk_shape is not None and name.endswith("/"):
            slash = "ends in '/', so Orbax cannot read the array: remove the '/'"
            faults[info.path] = slash
        elif _SURROGATES.search(name):
            faults[info.path] = "is not valid Unicode"
        elif len(name.encode()) > _MAX_DATABASE_NAME_BYTES:
            long = f"is longer than {_MAX_DATABASE_NAME_BYTES} bytes on disk"
            faults[f"{info.path[:60]} …"] = long
        elif (
            not ocdbt
            and info.chunk_shape is not None
            and (not _is_file_safe(name) or (not name and len(infos) > 1))
        ):
            faults[info.path] = "is not a valid name of a directory; use store='ocdbt'"
    for name, outer in _nested_names(strings):
        faults[seen[name]] = f"continues the name of the string {outer!r} after a '/'"
    if faults:
        advice = "Rename these keys, as transforms=[rename(pattern, new)]."
        if len(seen) < len(infos):
            advice += " On disk, keys are joined by dots."
        raise errors.LeafNameError(faults, advice)


def _nested_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields each name that continues another name after a `/`, and the other name."""
    names = set(names)
    for name in names:
        end = name.find("/")
        while end >= 0:
            if name[:end] in names:
                yield name, name[:end]
            end = name.find("/", end + 1)


def are_file_safe(infos: Sequence[LeafInfo], names: Sequence[str]) -> bool:
    """Returns True if each name on disk can be the directory of an array."""
    return all(
        # An array without a name would share the parent directory of other arrays.
        _is_file_safe(name) and (name or len(infos) == 1)
        for info, name in zip(infos, names, strict=True)
        if info.chunk_shape is not None
    )


def _is_file_safe(name: str) -> bool:
    return (
        len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES
        and name not in _RESERVED
        and name not in (".", "..")
        and not _UNSAFE_CHARACTERS.search(name)
    )
