"""What leaves are called on disk: which of these names a file system and Orbax take."""

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
"""Half of what the keys of a database may have, which name chunks, too."""

_SURROGATES = re.compile(r"[\ud800-\udfff]")
_UNSAFE_CHARACTERS = re.compile(r"[/\\\n\0]")


def check(infos: Sequence[LeafInfo], names: Sequence[str], *, ocdbt: bool) -> None:
    """Refuses leaf names that would collide on disk or that readers cannot take.

    Args:
        infos: The leaves.
        names: What each is called on disk.
        ocdbt: Whether the arrays are in one database.

    Raises:
        LeafNameError: All names at fault.
    """
    faults: dict[str, str] = {}
    seen: dict[str, LeafPath] = {}
    strings = []
    for info, name in zip(infos, names, strict=True):
        if name in seen:
            faults[info.path] = f"is called {name!r} on disk, as {seen[name]} is"
        seen[name] = info.path
        if info.kind == "string":
            strings.append(name)
        if "\0" in name:
            faults[info.path] = "contains a NUL"
        elif info.kind == "string" and "~" in name:
            faults[info.path] = "is a string leaf with a '~', which Orbax cannot read"
        elif _SURROGATES.search(name):
            faults[info.path] = "is no valid Unicode"
        elif len(name.encode()) > _MAX_DATABASE_NAME_BYTES:
            long = f"is longer than {_MAX_DATABASE_NAME_BYTES} bytes on disk"
            faults[f"{info.path[:60]} …"] = long
        elif (
            not ocdbt
            and info.chunk_shape is not None
            and (not _is_file_safe(name) or (not name and len(infos) > 1))
        ):
            faults[info.path] = "is no name of a directory; store='ocdbt' takes it"
    for name, outer in _nested_names(strings):
        faults[seen[name]] = f"would stand inside the string {outer!r}"
    if faults:
        raise errors.LeafNameError(
            faults, "Rename these keys; on disk, keys are joined by dots."
        )


def _nested_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names that continue another one after a `/`, with that one."""
    known = set(names)
    for name in known:
        end = name.find("/")
        while end >= 0:
            if name[:end] in known:
                yield name, name[:end]
            end = name.find("/", end + 1)


def are_file_safe(infos: Sequence[LeafInfo], names: Sequence[str]) -> bool:
    """Whether each array can be a directory of its own; `names` are those on disk."""
    return all(
        # Without a name, an array lies where the directories of others do.
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
