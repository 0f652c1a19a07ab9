"""Reads the items of a step of Orbax: a single tree, or several items as one tree."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from flaxckpt import _state, _steps, _storage, errors
from flaxckpt._state.leaf import Leaf, LeafTable, StoredLeaf
from flaxckpt._types import JSON
from flaxckpt.formats import _orbax
from flaxckpt.formats._msgpack import leaves
from flaxckpt.formats._native import items, orbax_json
from flaxckpt.formats._native import metadata as native_metadata
from flaxckpt.formats._native.items import Items
from flaxckpt.formats._reader import Lineage, Stored

_log = logging.getLogger(__name__)

ReadNative: TypeAlias = Callable[[Path], Stored]
"""Reads an item in our own format."""

_DIRECTORIES = frozenset(("descriptor",))
"""Directories of Orbax in a step that are no items."""

_MAX_NAME_BYTES = 255
"""Limit of file systems on the name of a directory."""


def read(path: Path, step: int | None, read_native: ReadNative) -> Stored:
    """Reads everything but the arrays of a checkpoint of Orbax.

    With a single tree of arrays, that tree is the state, and JSON items are in the
    metadata only. With several trees, or JSON items alone, the state is a dict of all
    items. Items of other kinds are left out with a warning.

    Args:
        path: The checkpoint.
        step: Step number, or None.
        read_native: Reads an item in our own format.

    Raises:
        DamagedCheckpointError: A file is missing or malformed.
        FileNotFoundError: The checkpoint was deleted after its format was recognised.
    """
    found = items.find_item(path)
    if found is None:  # deleted since it was recognised
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if found == path:
        stored = _orbax.read(path, path)
        return _add_metadata(stored, path, step, Items(state=""), (), {})
    listing = _list_items(path)
    trees, texts = listing.trees, listing.texts
    left_out = dict(listing.left_out)
    parts: dict[str, Stored] = {}
    for item in trees:
        try:
            parts[item] = _read_tree(path, item, read_native)
        except errors.DamagedCheckpointError as error:
            if not listing.is_stray(item):
                raise
            left_out[item] = (
                f"is not an item that {items.CHECKPOINT} names, and cannot be read:"
                f" {errors.one_line(error, 150)}"
            )
    json = {item: items.read_json_item(path / item, path, {}) for item in texts}
    if len(parts) + len(listing.lost) == 1 and parts:
        [(item, stored)] = parts.items()
        state: str | tuple[str, ...] = item
        own = {item: stored} if items.is_native(path / item) else {}
        stored = dataclasses.replace(
            stored, digests=_add_prefix(item, stored.digests), own_items=own
        )
    else:
        for item, value in json.items():
            try:
                parts[item] = _read_json(path, item, value)
            except ValueError as error:
                left_out[item] = f"cannot be leaves of a state: {error}"
        parts = dict(sorted(parts.items()))
        state = tuple(parts)
        stored = _merge(path, parts)
    _warn_of(path, left_out, parts)
    stored = dataclasses.replace(stored, left_out=left_out)
    return _add_metadata(stored, path, step, Items(state=state), trees, json)


# ---- listing ------------------------------------------------------------------------


class _Listing(NamedTuple):
    """The items of a step.

    Attributes:
        handlers: Item -> class of the handler, as far as recorded.
        trees: The items with arrays.
        texts: The JSON items.
        lost: The items with arrays that were deleted.
        left_out: Item -> the reason why it is not read.
    """

    handlers: Mapping[str, str]
    trees: Sequence[str]
    texts: Sequence[str]
    lost: Sequence[str]
    left_out: Mapping[str, str]

    def is_stray(self, item: str) -> bool:
        """Returns True if the handlers of other items are recorded."""
        return bool(self.handlers) and item not in self.handlers


def _list_items(path: Path) -> _Listing:
    """Lists the items of a step by their files, and by the recorded handlers.

    Raises:
        DamagedCheckpointError: An item is incomplete, or has an unsafe name.
    """
    recorded = items.read_item_handlers(path)
    handlers = recorded if isinstance(recorded, dict) else {}
    deleted = native_metadata.read_deleted_items(path)
    listing = _Listing({str(k): str(v) for k, v in handlers.items()}, [], [], [], {})
    trees, texts, lost, left_out, faults = [], [], [], {}, {}
    for name in sorted({*_storage.of(path).names(path), *listing.handlers}):
        item, handler = path / name, listing.handlers.get(name, "")
        if not _is_file_name(name):
            faults[name] = "is not the name of a directory in the checkpoint"
        elif name in deleted or (handler and not item.is_dir()):
            if items.is_tree_handler(handler):
                why = "was deleted from" if name in deleted else "is missing from"
                left_out[name] = f"{why} this step; restore another"
                lost.append(name)
            elif "Json" in handler and name not in (*deleted, items.METRICS):
                left_out[name] = "is missing from this step; restore another"
        elif not item.is_dir() or _is_temporary(name):
            continue
        elif items.is_tree(item) or items.is_native(item):
            trees.append(name)
        elif items.find_json(item):
            texts.append(name)
        elif items.is_tree_handler(handler):
            faults[name] = f"has lost the description of its leaves, {items.TREE}"
        elif not _is_beside(item, handler):
            left_out[name] = _explain_unknown(item, handler)
    if faults or not (trees or texts):
        rows = [f"{name!r:.80} {why}" for name, why in (faults or left_out).items()]
        raise errors.DamagedCheckpointError(
            f"{path} has items that cannot be read:\n{errors.rows(rows)}\nRestore"
            " another step, or pass the path of an intact item."
        )
    return _Listing(listing.handlers, trees, texts, lost, left_out)


def _is_file_name(name: str) -> bool:
    is_short = 0 < len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES
    return is_short and "/" not in name and not orbax_json.UNSAFE.search(name)


def _is_temporary(name: str) -> bool:
    return _storage.temporary.TEMPORARY in name or _steps.names.is_temporary(name)


def _is_beside(directory: Path, handler: str) -> bool:
    """Returns True for a directory beside the items of the state.

    It has metrics or the files of a dataset iterator, or is not the item of a handler.
    """
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


def _warn_of(
    path: Path, left_out: Mapping[str, str], parts: Mapping[str, Stored]
) -> None:
    """Logs a warning about the items that are left out."""
    if left_out:
        _log.warning(
            "only the items %s of %s are read; the others are left out:\n%s",
            errors.printable(", ".join(parts)),
            path,
            errors.rows(f"{name} {why}" for name, why in left_out.items()),
        )


# ---- reading ------------------------------------------------------------------------


def _read_tree(path: Path, item: str, read_native: ReadNative) -> Stored:
    """Reads an item with arrays; root of its leaves is the checkpoint `path`."""
    directory = path / item
    if not items.is_native(directory):
        return _orbax.read(path, directory)
    items.read_file(directory / orbax_json.MANIFEST, path)  # no link out of the step
    return read_native(directory)


def _read_json(path: Path, item: str, value: JSON) -> Stored:
    """Returns a JSON item as a tree.

    Raises:
        ValueError: A value cannot be a leaf.
    """
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
    """Yields the leaves and empty containers of JSON, with their keys.

    Raises:
        ValueError: A value cannot be a leaf.
    """
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
    own = {item: part for item, part in parts.items() if items.is_native(path / item)}
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
        {
            name: digest
            for item, part in parts.items()
            for name, digest in _add_prefix(item, part.digests).items()
        },
        first.stamp,
        own_items=own,
    )


def _nest(path: Path, item: str, leaf: Leaf) -> Leaf:
    """Returns a leaf of an item as a leaf of the checkpoint `path`."""
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


def _add_prefix(item: str, digests: Mapping[str, str]) -> dict[str, str]:
    return {f"{item}/{name}": digest for name, digest in digests.items()}


def _add_metadata(
    stored: Stored,
    path: Path,
    step: int | None,
    layout: Items,
    trees: Sequence[str],
    json: Mapping[str, JSON],
) -> Stored:
    """Returns a checkpoint with the metadata of the step `path`.

    Args:
        stored: The leaves.
        path: The checkpoint.
        step: Step number, or None.
        layout: The items of the leaves.
        trees: The items with arrays.
        json: JSON item -> content.
    """
    dataset = items.find_dataset(path)
    if dataset is not None:
        layout = dataclasses.replace(layout, dataset=dataset.name)
    infos = [leaf.info for leaf in stored.table.values()]
    metadata = native_metadata.checkpoint_metadata(
        path, "orbax", step, infos, {}, None if dataset is None else dataset.name
    )
    metadata = dataclasses.replace(
        metadata,
        lineage=stored.metadata.lineage,
        transforms=stored.metadata.transforms,
        items=tuple(trees),
        json=json,
    )
    return dataclasses.replace(stored, metadata=metadata, items=layout)
