"""Reads the items of a step of Orbax: a single tree, or several items as one tree."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from flaxckpt import _state, _steps, _storage, errors
from flaxckpt._formats import items, native_metadata, orbax, orbax_json
from flaxckpt._formats.items import Items
from flaxckpt._formats.msgpack import leaves
from flaxckpt._formats.reader import Lineage, Stored
from flaxckpt._state.leaf import Leaf, LeafTable, StoredLeaf
from flaxckpt._types import JSON

ReadNative: TypeAlias = Callable[[Path], Stored]
"""Reads an item in our own format."""

_DIRECTORIES = frozenset(("descriptor",))
"""Directories of Orbax in a step that are no items."""

_MAX_NAME_BYTES = 255
"""Limit of file systems on the name of a directory."""


def read(path: Path, step: int | None, read_native: ReadNative) -> Stored:
    """Reads everything but the arrays of a checkpoint of Orbax.

    With a single tree of arrays, that tree is the state. With several, the state is a
    dict of trees, of which one may be damaged; without any, a dict of JSON items.
    Raises DamagedCheckpointError if no item can be read, FileNotFoundError if it was
    deleted.
    """
    found = items.find_item(path)
    if found is None:  # deleted since it was recognised
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if found == path:
        stored = orbax.read(path, path)
        names = _storage.of(path).names(path)
        deleted = _steps.markers.deleted_items(names)
        return _add_metadata(
            stored, path, step, Items(state=""), names, deleted, (), {}, {}
        )
    listing = _list_items(path)
    json = items.read_json_items(path, listing.texts, {})
    branches = _read_trees(path, listing, read_native)
    trees = [*branches.parts]
    if not (trees or branches.damaged):
        branches = _read_texts(path, listing, json)
    parts, damaged = branches.parts, {**branches.damaged, **json.damaged}
    if not parts:
        raise _unreadable_error(path, damaged or branches.left_out)
    state: str | tuple[str, ...]
    if len({*parts, *branches.damaged, *listing.lost}) == 1 and trees:
        [(state, stored)] = parts.items()
        stored = dataclasses.replace(
            stored, manifest=None, own_items={state: stored} if stored.manifest else {}
        )
    else:
        state = tuple(sorted({*parts, *branches.damaged}))
        stored = _merge(path, parts)
    warnings = (
        *_describe_left_out(path, branches.left_out, [*parts, *json], listing.deleted),
        *items.describe_damaged_items(path, damaged),
    )
    stored = dataclasses.replace(stored, left_out=branches.left_out, warnings=warnings)
    damaged |= {
        item: branches.left_out[item]
        for item in listing.lost
        if item not in listing.deleted
    }
    layout = Items(state=state, dataset=listing.deleted_dataset)
    return _add_metadata(
        stored, path, step, layout, listing.names, listing.deleted, trees, json, damaged
    )


# ---- listing ------------------------------------------------------------------------


class _ItemListing(NamedTuple):
    """The items of a step, by kind; `lost` are trees that are missing or deleted.

    `handlers` are recorded classes; `damaged` and `left_out` have the reasons.
    """

    handlers: Mapping[str, str]
    names: Collection[str]
    deleted: Collection[str]
    trees: list[str]
    texts: list[str]
    lost: list[str]
    damaged: dict[str, str]
    left_out: dict[str, str]

    @property
    def deleted_dataset(self) -> str:
        """Name of the item of the dataset, if it was deleted; else the usual name."""
        deleted = (name for name in self.deleted if name in self.handlers)
        return next((n for n in deleted if n not in self.left_out), items.DATASET)

    def is_stray(self, item: str) -> bool:
        """Returns True if the handlers of other items are recorded."""
        return bool(self.handlers) and item not in self.handlers


def _list_items(path: Path) -> _ItemListing:
    """Lists the items of a step by their files, and by the recorded handlers."""
    recorded = items.read_item_handlers(path)
    recorded = recorded if isinstance(recorded, dict) else {}
    handlers = {str(item): str(handler) for item, handler in recorded.items()}
    found = _storage.of(path).names(path)
    deleted = sorted(_steps.markers.deleted_items(found))
    listing = _ItemListing(handlers, found, deleted, [], [], [], {}, {})
    names = sorted({*found, *handlers})
    faults = {
        name: "is not the name of a directory in the checkpoint"
        for name in names
        if not _is_file_name(name)
    }
    if not faults:
        for name in names:
            _list_item(path, name, listing)
    if faults or not (listing.trees or listing.texts):
        raise _unreadable_error(path, faults or {**listing.left_out, **listing.damaged})
    return listing


def _list_item(path: Path, name: str, listing: _ItemListing) -> None:
    """Adds an entry of a step, or an item of a recorded handler, to `listing`."""
    item, handler = path / name, listing.handlers.get(name, "")
    is_json = "Json" in handler and name != items.METRICS
    if name in listing.deleted or (handler and not item.is_dir()):
        is_deleted = name in listing.deleted
        if is_json and not is_deleted:
            listing.texts.append(name)  # reading it raises an error
        elif is_json or items.is_tree_handler(handler):
            why = "was deleted from" if is_deleted else "is missing from"
            listing.left_out[name] = f"{why} this step"
            listing.lost.extend([] if is_json else [name])
    elif not item.is_dir() or _steps.names.is_temporary(name):
        return
    elif items.is_tree(item) or items.is_native(item):
        listing.trees.append(name)
    elif items.find_json(item) or (is_json and not items.is_dataset(item)):
        listing.texts.append(name)
    elif items.is_tree_handler(handler):
        why = f"has lost the description of its leaves, {items.TREE}"
        listing.damaged[name] = f"{why}; restore another step"
    elif not _is_beside(item, handler):
        listing.left_out[name] = _explain_unknown(item, handler)


def _is_file_name(name: str) -> bool:
    is_short = 0 < len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES
    return is_short and "/" not in name and not orbax_json.UNSAFE.search(name)


def _is_beside(directory: Path, handler: str) -> bool:
    """Returns True for metrics, a dataset, or a directory that no handler wrote."""
    name = directory.name
    if name == items.METRICS and (directory / items.METRICS).is_file():
        return True
    if items.is_dataset(directory):
        return True
    return not handler and (name in _DIRECTORIES or not any(directory.iterdir()))


def _explain_unknown(item: Path, handler: str) -> str:
    key = item / "jax_random_key"
    if items.is_tree(key):
        return f"holds PRNG keys: pass the path of their data, {key}"
    if handler:
        return f"was written by a handler that flaxckpt does not know, {handler:.200}"
    return "has no files of a tree of arrays or of a JSON item"


def _unreadable_error(
    path: Path, faults: Mapping[str, str]
) -> errors.DamagedCheckpointError:
    rows = [f"{name!r:.80} {why}" for name, why in faults.items()]
    return errors.DamagedCheckpointError(
        f"{path} has items that cannot be read:\n{errors.rows(rows)}\nRestore"
        " another step, or pass the path of an intact item."
    )


def _describe_left_out(
    path: Path,
    left_out: Mapping[str, str],
    read: Sequence[str],
    deleted: Collection[str],
) -> tuple[str, ...]:
    """Returns a warning about items that are left out, unless deleted on purpose."""
    rows = [f"{name} {why}" for name, why in left_out.items() if name not in deleted]
    if not rows:
        return ()
    names = errors.printable(", ".join(read))
    return (
        f"only the items {names} of {path} are read; the others are left out:\n"
        f"{errors.rows(rows)}",
    )


# ---- reading ------------------------------------------------------------------------


class _Branches(NamedTuple):
    """The items that are branches of the state: item -> its tree, or the reason."""

    parts: Mapping[str, Stored]
    damaged: Mapping[str, str]
    left_out: Mapping[str, str]


def _read_trees(
    path: Path, listing: _ItemListing, read_native: ReadNative
) -> _Branches:
    """Reads the items with arrays; raises an error if the only one is damaged."""
    parts: dict[str, Stored] = {}
    damaged, left_out = dict(listing.damaged), dict(listing.left_out)
    for item in listing.trees:
        try:
            parts[item] = _read_tree(path, item, read_native)
        except errors.DamagedCheckpointError as error:
            if listing.is_stray(item):
                left_out[item] = (
                    f"is not an item that {items.CHECKPOINT} names, and cannot be read:"
                    f" {errors.one_line(error, 150)}"
                )
            elif len(listing.trees) + len(listing.damaged) == 1:
                raise
            else:
                damaged[item] = items.describe_damage(error)
    return _Branches(parts, damaged, left_out)


def _read_texts(path: Path, listing: _ItemListing, json: items.JsonItems) -> _Branches:
    parts: dict[str, Stored] = {}
    left_out = dict(listing.left_out)
    for item, value in json.items():
        try:
            parts[item] = _read_json(path, item, value)
        except ValueError as error:
            left_out[item] = f"cannot be leaves of a state: {error}"
    return _Branches(parts, json.damaged, left_out)


def _read_tree(path: Path, item: str, read_native: ReadNative) -> Stored:
    """Reads an item with arrays; root of its leaves is the checkpoint `path`."""
    directory = path / item
    if not items.is_native(directory):
        return orbax.read(path, directory)
    items.read_file(directory / orbax_json.MANIFEST, path)  # no link out of the step
    return read_native(directory)


def _read_json(path: Path, item: str, value: JSON) -> Stored:
    """Returns a JSON item as a tree; raises ValueError if a value cannot be a leaf."""
    if not isinstance(value, dict | list):
        raise ValueError("it is neither an object nor a list")
    file = items.find_json(path / item) or path / item
    rows = list(_walk(value, ()))
    return leaves.make_stored(
        path, file, rows, format_name="orbax", step=None, stamp=_storage.stamp(file)
    )


def _walk(
    value: JSON, keys: tuple[_state.tree.Key, ...]
) -> Iterator[tuple[tuple[_state.tree.Key, ...], JSON]]:
    """Yields the leaves and empty containers of JSON, with their keys."""
    if len(keys) > _state.tree.MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {_state.tree.MAX_DEPTH} levels")
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _walk(child, (*keys, _state.tree.Key(name, "key")))
    elif isinstance(value, list) and value:
        for i, child in enumerate(value):
            yield from _walk(child, (*keys, _state.tree.Key(i, "index")))
    else:
        if type(value) is int and not -(2**63) <= value < 2**63:
            name = _state.tree.join(keys)
            raise ValueError(f"{name:.80} needs more than 64 bits")
        yield keys, value


def _merge(path: Path, parts: Mapping[str, Stored]) -> Stored:
    """Returns items as one tree; the leaf paths begin with the name of the item."""
    table: LeafTable = {}
    for item, part in parts.items():
        for leaf in part.table.values():
            nested = _nest(path, item, leaf)
            table[nested.info.path] = nested
    first = next(iter(parts.values()))
    own = {item: part for item, part in parts.items() if part.manifest}
    lineage: tuple[Lineage, ...] = ()
    for part in parts.values():
        lineage += tuple(o for o in part.metadata.lineage if o not in lineage)
    return Stored(
        dataclasses.replace(
            first.metadata,
            lineage=lineage,
            transforms=tuple(
                text for part in parts.values() for text in part.metadata.transforms
            ),
        ),
        table,
        _state.tree.nest({item: part.structure for item, part in parts.items()}),
        frozenset().union(*(part.unknown_types for part in parts.values())),
        stamp=first.stamp,
        own_items=own,
    )


def _nest(path: Path, item: str, leaf: Leaf) -> Leaf:
    key = _state.tree.Key(item, "key")
    info, role = leaf.info, leaf.info.role
    if role is not None:
        container = _state.tree.join((key,))
        if role.optimizer:
            container += f"/{role.optimizer}"
        role = role._replace(optimizer=container)
    keys = (key, *info.keys)
    info = dataclasses.replace(info, path=_state.tree.join(keys), keys=keys, role=role)
    sources = tuple(
        dataclasses.replace(source, root=path, info=info)
        if isinstance(source, StoredLeaf)
        else source
        for source in leaf.sources
    )
    return Leaf(info, sources, leaf.fn)


def _add_metadata(
    stored: Stored,
    path: Path,
    step: int | None,
    layout: Items,
    names: Collection[str],
    deleted: Collection[str],
    trees: Sequence[str],
    json: Mapping[str, JSON],
    damaged: Mapping[str, str],
) -> Stored:
    """Returns a checkpoint with the metadata of the step, and reasons of damage."""
    dataset = items.find_dataset(path)
    if dataset is not None:
        layout = dataclasses.replace(layout, dataset=dataset.name)
    infos = [leaf.info for leaf in stored.table.values()]
    metadata = native_metadata.checkpoint_metadata(
        path,
        "orbax",
        step,
        infos,
        {},
        None if dataset is None else dataset.name,
        names,
        deleted,
    )
    metadata = dataclasses.replace(
        metadata,
        lineage=stored.metadata.lineage,
        transforms=stored.metadata.transforms,
        items=tuple(trees),
        json=json,
        damaged_items=damaged,
    )
    return dataclasses.replace(stored, metadata=metadata, items=layout)
