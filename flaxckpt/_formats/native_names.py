"""Checks of the names of leaves on disk, for the file system and for Orbax."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import cast

from flaxckpt import _steps, errors
from flaxckpt._formats import items
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath

_MAX_NAME_BYTES = 2**15
"""Half of the limit on database keys; a key includes the name of the chunk."""

_SURROGATES = re.compile(r"[\ud800-\udfff]")


def check(infos: Sequence[LeafInfo], names: Sequence[str]) -> None:
    """Raises LeafNameError for names that collide on disk or that readers refuse."""
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
        elif len(name.encode()) > _MAX_NAME_BYTES:
            long = f"is longer than {_MAX_NAME_BYTES} bytes on disk"
            faults[f"{info.path[:60]} …"] = long
    for name, outer in _nested_names(strings):
        faults[seen[name]] = f"continues the name of the string {outer!r} after a '/'"
    if faults:
        advice = "Rename these keys, as transforms=[rename(pattern, new)]."
        if len(seen) < len(infos):
            advice += " On disk, keys are joined by dots."
        raise errors.LeafNameError(faults, advice)


def make_items(state: object, dataset: object) -> items.Items:
    if not isinstance(state, str):
        if not isinstance(state, Sequence):
            raise errors.OptionError(
                "items must be the name of the item with the state, or the names of the"
                f" top-level branches of the state, got {state!r:.80}"
            )
        state = tuple(state)
    elif not state:
        raise errors.OptionError(
            "items is an empty text: wanted the name of the item with the state"
        )
    layout = items.Items(state, cast(str, dataset))
    check_items(layout, ())
    return layout


def check_items(layout: items.Items, json: Collection[str]) -> None:
    """Raises OptionError for items that cannot be directories of a checkpoint."""
    if layout == _USUAL and not json:
        return  # every save asks
    roles: dict[str, str] = {}
    faults: dict[object, str] = {}
    is_root = layout.state == ""  # a checkpoint without items
    trees = () if is_root else layout.trees
    for role, names in (
        ("items", trees),
        ("dataset_item", (layout.dataset,)),
        ("json", json),
    ):
        for name in names:
            fault = find_fault(name)
            if fault is None and name == items.DATASET and role != "dataset_item":
                fault = _OTHER_USE
            if fault is None and name in roles:
                fault = f"the name is also in {roles[name]}"
            if fault is not None:
                faults.setdefault(name, f"{role}: {fault}")
            roles[name] = role
    if not layout.trees:
        faults[()] = "items: wanted at least one name"
    if faults:
        raise errors.OptionError(
            "these items cannot be saved; choose other names:\n"
            + errors.rows(f"{name!r:.80} in {why}" for name, why in faults.items())
        )


_USUAL = items.Items()

_OTHER_USE = "this name has another use in a checkpoint"


def find_fault(item: object) -> str | None:
    """Returns the reason why no item of a checkpoint has a name, or None."""
    if not _ITEM.fullmatch(str(item)):
        return (
            "wanted the name of a directory, of letters, digits, '_', '-' and"
            " '.', with a letter first"
        )
    if item in _NOT_ITEMS or _steps.markers.is_marker(str(item)):
        return _OTHER_USE
    return None


def check_branches(layout: items.Items, infos: Sequence[LeafInfo]) -> None:
    """Raises LeafNameError unless each leaf is in a branch that is an item."""
    if isinstance(layout.state, str):
        return
    faults = {}
    found = set()
    for info in infos:
        branch = str(info.keys[0].name) if info.keys else ""
        found.add(branch)
        if branch not in layout.state:
            faults[branch] = "is a branch of the state, but not an item"
        elif len(info.keys) < 2 and info.kind == "empty":
            faults[branch] = "is empty, which Orbax cannot read as an item"
        elif len(info.keys) < 2:
            faults[branch] = "is a single leaf, and an item must be a container"
    for item in layout.state:
        if item not in found:
            faults[item] = "is an item, but not a branch of the state"
    if faults:
        raise errors.LeafNameError(
            faults,
            f"The top-level branches of the state must be items={layout.state}; put"
            " single leaves into a dict, or save the whole state as items='state'.",
        )


_ITEM = re.compile(r"[^\W\d][\w.-]{0,99}")

_NOT_ITEMS = items.UNDIGESTED | {
    *(items.METRICS, items.CHECKPOINT, items.TREE),
    *("metadata", "descriptor"),
}
"""Names of other files and directories in a checkpoint."""


def _nested_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields each name that continues another name after a `/`, and the other name."""
    names = set(names)
    for name in names:
        end = name.find("/")
        while end >= 0:
            if name[:end] in names:
                yield name, name[:end]
            end = name.find("/", end + 1)
