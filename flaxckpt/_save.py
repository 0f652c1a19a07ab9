"""Saving: plan and snapshot on the caller's thread, write and commit behind it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from flaxckpt import (
    _access,
    _collector,
    _containers,
    _derive,
    _flax,
    _layout,
    _optax,
    _progress,
    _snapshot,
    _steps,
    _storage,
    _threads,
    _tree,
    _unfinished,
    _write,
    _zarr,
    datasets,
    errors,
)
from flaxckpt._handle import SaveHandle
from flaxckpt._info import ArrayLayout, Leaf, LeafInfo, LeafTable, Lineage, SaveResult
from flaxckpt._types import JSON, LeafPath, PathLike, PyTree
from flaxckpt.formats import _orbax, _orbax_json
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _table as _transforms

_log = logging.getLogger(__name__)

# Where a database is faster both ways; docs/benchmarks.md has the measurement.
_MANY_LEAVES = 64
_SMALL_LEAF_BYTES = 128 * 2**10


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What belongs to a checkpoint beside its state.

    Attributes:
        step: Its number, or None.
        layout: How arrays are cut and encoded.
        transforms: What to change on the way to the checkpoint.
        metrics: What was measured.
        metadata: The user's own, JSON.
        dataset: A dataset iterator, or None.
        overwrite: Whether an existing checkpoint is replaced.
        max_concurrent_bytes: Budget of the writing thread.
        lineage: What the run began from.
        planned: Called with what will be saved, before its values are taken.
        temporary: Whether it stays only until there is a newer step.
        count: Called with bytes of values whenever some are written.
    """

    step: int | None = None
    layout: ArrayLayout = dataclasses.field(default_factory=ArrayLayout)
    transforms: Sequence[Transform] = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    dataset: Any = None
    overwrite: bool = False
    max_concurrent_bytes: int = _write.DEFAULT_CONCURRENT_BYTES
    lineage: Sequence[Lineage] = ()
    planned: Callable[..., object] | None = None
    temporary: bool = False
    count: _write.Count = _progress.ignore


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A state as it was at the call of `save`, ready to be written.

    Attributes:
        final: Where the checkpoint will be.
        infos: All its leaves.
        structure: Its containers.
        arrays: The values that this process writes.
        strings: Param name -> value of the string leaves.
        dataset: File name -> content of the iterator's state.
        ocdbt: Whether the arrays go into one database.
        options: As given.
        created: Seconds since 1970.
    """

    final: Path
    infos: tuple[LeafInfo, ...]
    structure: _tree.Node | LeafPath
    arrays: tuple[_snapshot.HostArray, ...]
    strings: Mapping[str, str]
    dataset: Mapping[str, bytes]
    ocdbt: bool
    options: Options
    created: float

    @property
    def encoding(self) -> _zarr.Encoding:
        """How the chunks of the arrays are encoded."""
        return self.options.layout.encoding

    @property
    def nbytes(self) -> int:
        """Bytes of the values that this process writes, in memory."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def stored_bytes(self) -> int:
        """Size of all arrays of all processes, as stored if they are not compressed."""
        return sum(
            _layout.stored_bytes(i) for i in self.infos if i.chunk_shape is not None
        )


class Written(NamedTuple):
    """What a finished save has left.

    Attributes:
        size: Bytes of all files that were written; those that were linked do not count.
        arrays: Its arrays, for the save after it.
    """

    size: int
    arrays: _write.Previous


# ---- public functions -----------------------------------------------------------


def save(
    path: PathLike,
    state: PyTree,
    *,
    layout: ArrayLayout | None = None,
    transforms: Sequence[Transform] = (),
    metadata: Mapping[str, JSON] | None = None,
    overwrite: bool = False,
) -> SaveResult:
    """Saves `state` as one checkpoint at `path`, and returns when it is durable.

    Args:
        path: Where the checkpoint shall be; missing parents are made.
        state: A TrainState, NNX objects, or any pytree of arrays, numbers, strings,
            typed PRNG keys and None.
        layout: How arrays are cut and encoded.
        transforms: What to change on the way, as `transforms.cast`.
        metadata: JSON of your own, kept where Orbax keeps custom metadata.
        overwrite: Whether to replace a checkpoint that is there.

    Raises:
        CheckpointExistsError: `path` is taken.
        UnsupportedLeafError: Leaves that no checkpoint can hold.
        LeafNameError: Leaf names that collide on disk.
        SaveFailedError: The bytes could not be written.
    """
    return save_async(
        path,
        state,
        layout=layout,
        transforms=transforms,
        metadata=metadata,
        overwrite=overwrite,
    ).wait()


def save_async(
    path: PathLike,
    state: PyTree,
    *,
    layout: ArrayLayout | None = None,
    transforms: Sequence[Transform] = (),
    metadata: Mapping[str, JSON] | None = None,
    overwrite: bool = False,
) -> SaveHandle:
    """Like `save`, but returns once `state` is safe from changes.

    The state may be donated, trained on or changed in place as soon as this returns:
    what is saved is what it was at the call.
    """
    start = time.monotonic()
    final = _storage.resolve(path)
    counter = _progress.Counter(f"saving {final.name}")
    options = Options(
        layout=layout or ArrayLayout(),
        transforms=transforms,
        metadata=metadata or {},
        overwrite=overwrite,
        count=counter.add,
    )
    snapshot = take(final, state, options)
    counter.total = snapshot.nbytes
    blocked = time.monotonic() - start

    def work() -> SaveResult:
        written = execute(snapshot).size
        total = time.monotonic() - start
        _log_saved(snapshot.final, written, total, blocked)
        return SaveResult(None, str(snapshot.final), written, blocked, total)

    return SaveHandle(work, name=f"save of {final}", counter=counter)


def _log_saved(path: Path, written: int, total: float, blocked: float) -> None:
    _log.info(
        "saved %s: %d bytes, durable after %.3f s, blocked %.3f s",
        path,
        written,
        total,
        blocked,
    )


# ---- on the caller's thread -----------------------------------------------------


@_collector.paused()
def take(final: Path, state: PyTree, options: Options) -> Snapshot:
    """Plans the save and takes the state's values.

    Raises:
        CheckpointExistsError: `final` is taken and may not be replaced.
        OptionError: The metadata is no JSON.
        UnsupportedLeafError, LeafNameError, DatasetStateError: As `save` says.
    """
    created = time.time()
    _transforms.checked(options.transforms)
    with _access.explained(final):
        _check_free(final, overwrite=options.overwrite)
    check_json(options.metadata)
    flat = _flax.flatten(state)
    table, structure = _planned(flat, options)
    infos = tuple([leaf.info for leaf in table.values()])
    names = [_orbax_json.param_name(info.keys) for info in infos]
    ocdbt = uses_ocdbt(infos, names, options.layout)
    _orbax.check_names(infos, names, ocdbt=ocdbt)
    if options.planned is not None:
        stored = [info for info in infos if info.chunk_shape is not None]
        options.planned(
            bytes=sum(map(_layout.stored_bytes, stored)),
            leaves=len(infos),
            store="ocdbt" if ocdbt else "files",
        )
    arrays = [
        (name, leaf.info.chunk_shape, leaf)
        for name, leaf in zip(names, table.values(), strict=True)
        if leaf.info.chunk_shape is not None
    ]
    return Snapshot(
        final,
        infos,
        structure,
        tuple(_snapshot.to_host(arrays)),
        {
            name: str(leaf.source)
            for name, leaf in zip(names, table.values(), strict=True)
            if leaf.info.kind == "string"
        },
        {} if options.dataset is None else datasets.state_files(options.dataset),
        ocdbt,
        options,
        created,
    )


def without_optimizer(table: LeafTable) -> LeafTable:
    """The transform that leaves out whatever belongs to an optimizer."""
    roles = (leaf.info.role for leaf in table.values())
    optimizers = tuple({f"{role.optimizer}/" for role in roles if role is not None})
    return {
        path: leaf
        for path, leaf in table.items()
        if not f"{path}/".startswith(optimizers)
    }


def has_optimizer(state: PyTree) -> bool:
    """Whether anything of a state belongs to an optimizer."""
    flat = _flax.flatten(state)
    return bool(_optax.roles(flat.structure, flat.optimizer_states))


def _planned(
    flat: _flax.FlatState, options: Options
) -> tuple[LeafTable, _tree.Node | LeafPath]:
    """What to save: leaves with their roles and chunk shapes, and the containers."""
    roles = _optax.roles(flat.structure, flat.optimizer_states)
    table, structure = flat.table, flat.structure
    if options.transforms:
        table = _optax.with_roles(
            table, roles
        )  # so that moments go with their parameters
        table = _derive.computed(_transforms.apply(options.transforms, table))
        structure = _containers.of(structure, flat.table, table)
        table = _with_keys(table, dict(_tree.key_paths(structure)))
        roles = {}
    for path, leaf in table.items():
        known = roles.get(path)
        role = leaf.info.role if known is None else known.role(path)
        info = _layout.with_chunk_shape(leaf.info, options.layout, role=role)
        table[path] = Leaf(info, leaf.sources)
    return table, structure


def _with_keys(
    table: LeafTable, keys: Mapping[LeafPath, tuple[_tree.Key, ...]]
) -> LeafTable:
    return {
        path: Leaf(dataclasses.replace(leaf.info, keys=keys[path]), leaf.sources)
        for path, leaf in table.items()
    }


def uses_ocdbt(
    infos: Sequence[LeafInfo], names: Sequence[str], layout: ArrayLayout
) -> bool:
    if layout.store != "auto":
        return layout.store == "ocdbt"
    sizes = [_layout.stored_bytes(i) for i in infos if i.chunk_shape is not None]
    many_small = len(sizes) > _MANY_LEAVES and sum(sizes) < _SMALL_LEAF_BYTES * len(
        sizes
    )
    return many_small or not _orbax.file_safe(infos, names)


def _check_free(final: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(final):
        return
    if final.is_dir() and not final.is_symlink() and not any(final.iterdir()):
        return
    if not overwrite:
        raise errors.CheckpointExistsError(
            f"{final} exists: choose another path, or pass overwrite=True"
        )
    is_ours = _steps.is_damaged(final) or _orbax.is_whole(final)
    if final.is_symlink() or not is_ours:
        raise errors.CheckpointExistsError(
            f"{final} exists and is no checkpoint, so it is not overwritten:"
            " remove it yourself, or choose another path"
        )


def check_json(metadata: Mapping[str, JSON]) -> None:
    """Refuses metadata that would not come back equal.

    Raises:
        OptionError: It is no dict of JSON values, or has keys that are no strings.
    """
    try:
        read = json.loads(json.dumps(dict(metadata)))
    except (TypeError, ValueError) as error:
        raise errors.OptionError(
            f"metadata must be a dict of JSON values: {error}"
        ) from None
    if _keys(read) != _keys(dict(metadata)):
        raise errors.OptionError("metadata must have str keys only, as JSON has")


def _keys(data: Any) -> Any:
    """The keys of nested dicts, to compare."""
    if isinstance(data, Mapping):
        return {key: _keys(value) for key, value in data.items()}
    return [_keys(item) for item in data] if isinstance(data, list | tuple) else None


# ---- behind it ------------------------------------------------------------------


_locks: collections.defaultdict[Path, threading.Lock] = collections.defaultdict(
    threading.Lock
)
"""One writer at a time of a path, within this process."""

os.register_at_fork(after_in_child=_locks.clear)  # those that hold them are not there


def execute(snapshot: Snapshot, previous: _write.Previous | None = None) -> Written:
    """Writes a snapshot and commits it, durably.

    Args:
        snapshot: What to write.
        previous: Arrays of an earlier step; those that are equal are linked.

    Raises:
        SaveFailedError: It could not be written. What was written is removed, or,
            after the disk did not confirm its name, told of.
    """
    with _locks[snapshot.final]:
        return _execute(snapshot, previous)


def _execute(snapshot: Snapshot, previous: _write.Previous | None) -> Written:
    final = snapshot.final
    try:
        _storage.make_directory(final.parent)
        _unfinished.sweep(final.parent, lambda name: name == final.name)
        with _unfinished.made(final) as temporary:
            return _write_and_commit(snapshot, temporary, previous)
    except errors.CheckpointError:
        raise
    except _storage.NotDurableError as error:
        raise errors.SaveFailedError(
            f"{final} was written, but the disk did not confirm its name: {error}\n"
            "Whether it stays, or what was there before, is not known; see that the"
            " disk is sound, then save again."
        ) from error
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise errors.SaveFailedError(
            f"{final} could not be saved: {' '.join(str(error).split())[:300]}\n"
            "Nothing of it is kept and earlier checkpoints are untouched; see that the"
            " directory is writable and has space, then save again."
        ) from error


def _write_and_commit(
    snapshot: Snapshot, temporary: Path, previous: _write.Previous | None
) -> Written:
    (temporary / _orbax.STATE).mkdir()
    contents = _contents(snapshot)
    made: dict[str, bytes] = {}

    @_collector.paused()
    def describe() -> None:
        made.update(_orbax.files(contents))
        _write_new(temporary, made)

    with _threads.beside(describe) as check:

        def count(size: int) -> None:
            check()
            snapshot.options.count(size)

        _write.write(
            temporary / _orbax.STATE,
            snapshot.arrays,
            encoding=snapshot.encoding,
            ocdbt=snapshot.ocdbt,
            previous=previous,
            max_concurrent_bytes=snapshot.options.max_concurrent_bytes,
            count=count,
        )
    _write_new(temporary, _orbax.seal(contents, made, temporary))
    is_temporary = snapshot.options.temporary
    _write_new(temporary, _steps.marks_of_new(snapshot.final, temporary=is_temporary))
    size = _storage.sync_tree(temporary)
    manifest = _storage.stamp(temporary / _orbax_json.MANIFEST)
    if snapshot.options.overwrite and snapshot.final.exists():
        aside = _unfinished.beside(snapshot.final, _unfinished.REPLACED)
        with _unfinished.claimed(snapshot.final):
            _storage.exchange(temporary, snapshot.final, aside)
    else:
        _storage.publish(temporary, snapshot.final)
    sources = {
        array.name: (array.source, array.dtype)
        for array in snapshot.arrays
        if array.source is not None
    }
    stamp = manifest._replace(path=snapshot.final / _orbax_json.MANIFEST)
    return Written(size, _write.Previous(snapshot.final / _orbax.STATE, sources, stamp))


def _contents(snapshot: Snapshot) -> _orbax.Contents:
    options = snapshot.options
    return _orbax.Contents(
        options.step,
        snapshot.infos,
        snapshot.structure,
        snapshot.strings,
        snapshot.ocdbt,
        snapshot.encoding,
        options.metrics,
        options.metadata,
        snapshot.dataset,
        snapshot.created,
        time.time(),
        versions(),
        options.lineage,
        _transforms.describe(options.transforms),
    )


def _write_new(root: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _storage.write(path, content)


@functools.cache
def versions() -> dict[str, str]:
    found = {"jax": jax.__version__}
    for name in ("flaxckpt", "flax", "optax", "tensorstore"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
