"""Save of a state: plan and snapshot on the caller's thread, writes on another."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flaxckpt import (
    _arrays,
    _distributed,
    _formats,
    _state,
    _steps,
    _storage,
    _util,
    datasets,
    errors,
)
from flaxckpt._checkpoint import commit, save_distributed
from flaxckpt._checkpoint.commit import SaveOptions, SaveRequest, Snapshot, WrittenFiles
from flaxckpt._checkpoint.overwrite import check_free, check_name
from flaxckpt._checkpoint.save_handle import SaveHandle, SaveResult
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable
from flaxckpt._transforms import base as _transforms
from flaxckpt._types import JSON, LeafPath, PathLike, PyTree
from flaxckpt._zarr.array_layout import ArrayLayout, check_layout
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)


# ---- public functions -----------------------------------------------------------


@_util.guessed_names.explain
def save(
    path: PathLike,
    state: PyTree,
    *,
    layout: ArrayLayout | None = None,
    transforms: Sequence[Transform] = (),
    metadata: Mapping[str, JSON] | None = None,
    items: str | Sequence[str] = _formats.items.STATE,
    json: Mapping[str, JSON] | None = None,
    overwrite: bool = False,
    permissions: int | None = None,
) -> SaveResult:
    """Saves `state` as a checkpoint at `path`; returns once the files are durable.

    Args:
        path: Path of the new checkpoint; missing parents are created.
        state: A TrainState, NNX objects, or any pytree of arrays, numbers, strings,
            typed PRNG keys and None.
        layout: Chunks and encoding of arrays.
        transforms: Changes to apply to the state first, such as `transforms.cast`.
        metadata: Your own JSON, stored at the place of Orbax's custom metadata, and
            copied at the call.
        items: The name of the item with the state; or the top-level branches of the
            state, each saved as an item of its own; see `Checkpointer`.
        json: Item -> JSON to save as an item of its own; see `metadata(path).json`.
        overwrite: Whether to replace an existing checkpoint. A directory that also
            has other files is not replaced.
        permissions: Mode of all directories that are made, such as 0o750, whatever the
            umask; files have the same without the bits to execute, 0o640. By default
            as the umask says.

    Raises:
        OptionError: `path` has the name of a file, such as `model.safetensors`.
        CheckpointExistsError: `path` exists.
        OptionError: The metadata is not JSON, or is larger than readers accept.
        OptionError: `permissions` is no mode, or `path` is in an object store.
        UnsupportedLeafError: No checkpoint can hold some leaves, or no reader accepts
            them.
        LeafNameError: Leaf names collide on disk, containers are nested too deep, or a
            container contains itself.
        SaveFailedError: The bytes could not be written, or all leaves together are
            larger than readers accept.
    """
    return save_async(
        path,
        state,
        layout=layout,
        transforms=transforms,
        metadata=metadata,
        items=items,
        json=json,
        overwrite=overwrite,
        permissions=permissions,
    ).wait()


@_util.guessed_names.explain
def save_async(
    path: PathLike,
    state: PyTree,
    *,
    layout: ArrayLayout | None = None,
    transforms: Sequence[Transform] = (),
    metadata: Mapping[str, JSON] | None = None,
    items: str | Sequence[str] = _formats.items.STATE,
    json: Mapping[str, JSON] | None = None,
    overwrite: bool = False,
    permissions: int | None = None,
) -> SaveHandle:
    """Starts a save like `save`, and returns once the values of `state` are copied.

    The state may then be donated, trained on or changed in place: the checkpoint has
    the values at the call.
    """
    started = time.monotonic()
    final = _storage.paths.resolve(path)
    check_name(final, "save")
    counter = _util.progress.Counter(f"saving {final.name}")
    operation = _distributed.agreement.begin("save", final, str(final))
    options = SaveOptions(
        layout=check_layout(layout),
        transforms=transforms,
        items=_formats.native_names.make_items(items, _formats.items.DATASET),
        mode=_storage.modes.check(permissions, final),
    )
    request = SaveRequest(
        path=final,
        options=options,
        metadata=metadata or {},
        json=json or {},
        on_exists="overwrite" if overwrite else "error",
        started=started,
        count=counter.add,
        operation=operation,
    )
    snapshot, write = _begin(request, state, str(final))
    counter.total = snapshot.nbytes
    return SaveHandle(
        write,
        name=f"save of {final}",
        counter=counter,
        cancellation=request.cancellation,
        pace=request.pace,
    )


def save_item(path: Path, state: PyTree, options: SaveOptions) -> Callable[[], object]:
    """Copies the values of `state`, for an item of a step that another program commits.

    With several processes, all of them call this and the returned function, and an
    error of one is an error of all. The returned function writes the item into the
    directory, which exists by then, durably.
    """
    what = f"the item {path}"
    # Each step has its own directory, and the operations of a run are counted.
    operation = _distributed.agreement.begin("item", path.parent.parent, what)
    request = SaveRequest(path=path, options=options, operation=operation, is_item=True)
    request.pace.lift()  # the other program does not tell when it waits
    _, write = _begin(request, state, what)
    return write


def _begin(
    request: SaveRequest, state: PyTree, what: str
) -> tuple[Snapshot, Callable[[], SaveResult]]:
    """Copies the values of `state`; returns them, and the function that writes them."""
    path, operation = request.path, request.operation
    with _distributed.agreement.report_failure(operation), commit.store_errors(path):
        snapshot = take_snapshot(request, state)
        if request.is_item and operation is not None:
            # The other program would wait for processes that raise an error alone.
            operation.exchange("taken")
    blocked = request.elapsed()

    def write() -> SaveResult:
        with _distributed.agreement.closing(operation):
            size = write_snapshot(snapshot).size
        total = request.elapsed()
        _log.info(
            "saved %s: %d bytes, durable after %.3f s, blocked %.3f s",
            what,
            size,
            total,
            blocked,
        )
        return SaveResult(None, str(path), size, blocked, total)

    return snapshot, write


# ---- on the caller's thread -----------------------------------------------------


@_util.gc_pause.pause()
def take_snapshot(request: SaveRequest, state: PyTree) -> Snapshot:
    """Plans the save and copies the values of the state; raises errors of `save`."""
    created = max(time.time(), request.not_before)
    path, options, operation = request.path, request.options, request.operation
    if not request.is_item and (operation is None or operation.is_first):
        with (
            _storage.read_errors.explain_errors(path),
            _storage.paths.listing_cache(path),
        ):
            check_free(path, overwrite=request.overwrite)
    metadata = copy_json(request.metadata)
    json_items = copy_json(request.json, "json")
    if json_items:  # the others are checked when they become options
        _formats.native_names.check_items(options.items, json_items)
    table, structure = plan_leaves(flatten(state, options), options)
    infos = tuple([leaf.info for leaf in table.values()])
    names = check_names(infos, options.items)
    _formats.native_manifest.check_arrays(infos)
    strings = {
        path: str(leaf.source)
        for path, leaf in table.items()
        if leaf.info.kind == "string"
    }
    _check_strings(strings)
    if request.on_planned is not None:
        size = sum(info.stored_bytes for info in infos)
        request.on_planned(bytes=size, leaves=len(infos))
    arrays = [
        (options.items.array_directory(leaf.info, names[path]), chunk_shape, leaf)
        for path, leaf in table.items()
        if (chunk_shape := leaf.info.chunk_shape) is not None
    ]
    devices = {}
    if operation is not None:
        devices = _arrays.to_host.places(arrays, operation.count)
        arrays = save_distributed.select_own(operation, infos, arrays)
    dataset = {} if request.dataset is None else datasets.state_files(request.dataset)
    manifest = _formats.native_manifest.Manifest(
        infos,
        structure,
        options.layout.encoding,
        options.items,
        _step_around(request.path) if request.is_item else request.step,
        tuple(request.lineage),
        _transforms.describe(options.transforms),
    )
    contents = _formats.native_contents.Contents(
        manifest=manifest,
        names=names,
        segment_bytes=manifest.segment_bytes(),
        json=json_items,
        strings=strings,
        metrics=request.metrics,
        custom=metadata,
        dataset=dataset,
        created=created,
        is_item=request.is_item,
    )
    if _may_be_too_large(infos):
        commit.metadata_files(contents, path)  # raises before the first write
    values = tuple(_arrays.to_host.to_host(arrays, devices, options.snapshot))
    return Snapshot(request=request, contents=contents, arrays=values)


_STRINGS_OF_A_LEAF = 24
"""Upper bound on the strings in the manifest for a leaf, keys included."""

_BYTES_OF_A_LEAF = 400
"""Upper bound on the bytes in the manifest for a leaf, without its names."""


def _may_be_too_large(infos: Sequence[LeafInfo]) -> bool:
    """Returns True if a manifest of these leaves may exceed the limits of readers."""
    names = sum([len(info.path) for info in infos])
    return (
        _STRINGS_OF_A_LEAF * len(infos) > _util.json_limits.MAX_STRINGS
        or _BYTES_OF_A_LEAF * len(infos) + 3 * names > _formats.orbax_json.MAX_BYTES
    )


_FEW_CHARACTERS = 2**18
"""This number of characters is within every limit, even with 12 bytes each as JSON."""


def _check_strings(strings: Mapping[LeafPath, str]) -> None:
    """Raises UnsupportedLeafError if string leaves exceed the limits of readers."""
    if sum(map(len, strings.values())) <= _FEW_CHARACTERS:
        return
    try:
        _formats.orbax_json.check_size(_formats.orbax_json.strings(strings))
    except ValueError as error:
        sizes = {path: len(text) for path, text in strings.items()}
        large = sorted(sizes, key=lambda path: -sizes[path])[: errors.ROWS_SHOWN]
        raise errors.UnsupportedLeafError(
            {path: f"a str of {sizes[path]} characters" for path in large},
            f"All strings of a state are one JSON file, and {error}. Save long strings"
            " as arrays: np.frombuffer(text.encode(), np.uint8).",
        ) from None


def flatten(state: PyTree, options: SaveOptions) -> _state.flax_state.FlatState:
    """Returns the leaves of a state; each of several items has all of its leaves."""
    has_items = not isinstance(options.items.state, str)
    return _state.flax_state.flatten(state, whole_branches=has_items)


def without_optimizer(table: LeafTable) -> LeafTable:
    """Returns `table` without optimizer leaves; used as a transform."""
    roles = (leaf.info.role for leaf in table.values())
    optimizers = tuple({f"{role.optimizer}/" for role in roles if role is not None})
    return {
        path: leaf
        for path, leaf in table.items()
        if not f"{path}/".startswith(optimizers)
    }


def has_optimizer(state: PyTree) -> bool:
    return bool(_state.flax_state.flatten(state).optimizer_facts)


@_util.gc_pause.pause()
def find_undo_problem(state: PyTree, options: SaveOptions) -> str | None:
    """Describes the leaves lost in a restore by a run with transforms, or None."""
    flat, transforms = flatten(state, options), options.transforms
    table = flat.table_to_transform()
    names = ", ".join(_transforms.describe(transforms))[:500]
    try:
        left = _transforms.not_restored(transforms, table)
    except errors.OptionError as error:
        return (
            "no step of this run can be restored into its state, because"
            f" {names} cannot be undone: {error}"
        )
    if _transforms.invert_for_restore(transforms) is None:
        left = sorted({*left, *_transforms.changed_in_place(transforms, table)})
        advice = (
            "Pass inverse= to map_leaf, or pass transforms=[...] that undo it to every"
            " restore"
        )
    else:
        advice = (
            "Those of the optimizer are initialized, and others raise an error. Leave"
            " out the transform, or use an optimizer whose moments have the shapes of"
            " their parameters"
        )
    if not left:
        return None
    return (
        "a resume of this run does not bring back the leaves for which"
        f" {names} has no inverse: {errors.first_few(left)}. {advice}"
    )


def plan_leaves(
    flat: _state.flax_state.FlatState, options: SaveOptions
) -> tuple[LeafTable, _state.tree.Node | LeafPath]:
    """Returns the leaves to save, with roles and chunk shapes, and the containers."""
    table, structure, roles = flat.table, flat.structure, flat.optimizer_facts
    if options.transforms:
        changed = _transforms.apply(options.transforms, flat.table_to_transform())
        _check_repeated(flat, changed)
        table = _arrays.evaluate.evaluate_state(changed)
        structure = _state.containers.build(structure, flat.table, table)
        places = _state.tree.leaf_places(structure)
        keys = {place.path: place.keys for place in places}
        table = {
            path: Leaf(dataclasses.replace(leaf.info, keys=keys[path]), leaf.sources)
            for path, leaf in table.items()
        }
        roles = {}
    for path, leaf in table.items():
        known = roles.get(path)
        role = leaf.info.role if known is None else known.role(path)
        info = _arrays.layout.with_chunk_shape(leaf.info, options.layout, role=role)
        table[path] = Leaf(info, leaf.sources)
    return table, structure


def _check_repeated(flat: _state.flax_state.FlatState, table: LeafTable) -> None:
    """Raises OptionError if transforms change a shared variable in one item only."""
    alone = []
    for path, first in flat.repeated.items():
        copies = [table[name] for name in (path, first) if name in table]
        forms = {(leaf.info.dtype, leaf.info.shape) for leaf in copies}
        if len(forms) > 1 or len({leaf.fn is None for leaf in copies}) > 1:
            alone.append((path, first))
    if alone:
        raise errors.OptionError(
            "transforms= change these variables, which items share, in one item only:"
            f"\n{errors.rows(' and '.join(paths) for paths in alone)}\nMatch the leaves"
            f" of both items, such as cast({'|'.join(alone[0])!r}, …): together, they"
            " are restored as one variable."
        )


def check_names(
    infos: Sequence[LeafInfo], items: _formats.items.Items
) -> dict[LeafPath, str]:
    """Returns Orbax's names of the leaves in their items, or raises LeafNameError."""
    _formats.native_names.check_branches(items, infos)
    names = {info.path: items.param_name(info) for info in infos}
    for leaves in items.split(infos).values():
        _formats.native_names.check(leaves, [names[info.path] for info in leaves])
    return names


def _step_around(item: Path) -> int | None:
    """Returns the step of an item that Orbax is about to commit; None if unknown."""
    name, is_temporary, _ = item.parent.name.partition(_storage.temporary.TEMPORARY)
    return _steps.names.number(name) if is_temporary else None


def copy_json(value: Mapping[str, JSON], what: str = "metadata") -> dict[str, JSON]:
    """Copies a user's JSON deeply, or raises OptionError if readers would refuse it."""
    try:
        if not isinstance(value, Mapping):
            raise ValueError(f"{what} is a {type(value).__name__}")
        if not value:
            return {}
        copy = _util.json_limits.copy(value, what)
        _formats.orbax_json.check_size(_formats.orbax_json.dumps(copy))
    except ValueError as error:
        raise errors.OptionError(
            f"the {what} cannot be saved as JSON: {errors.printable(str(error))}"
        ) from None
    return copy


# ---- on the saving thread ---------------------------------------------------------


def write_snapshot(
    snapshot: Snapshot, previous: _arrays.written.Previous | None = None
) -> WrittenFiles:
    """Writes a snapshot and commits the checkpoint durably, from all processes.

    Frees the snapshot's memory on devices. After an error, written files are removed;
    if the disk did not confirm the rename, the message says so.
    """
    request = snapshot.request
    try:
        if request.overwrite and not _storage.of(request.path).can_rename:
            # Removes the old checkpoint first: a cancelled save would leave neither.
            request.cancellation.close()
        if request.operation is not None:
            return save_distributed.write_snapshot(snapshot, previous)
        with commit.write_lock(request.path), commit.begin(snapshot) as transaction:
            files, arrays = commit.write_files(snapshot, transaction, previous)
            return commit.finish_checkpoint(snapshot, transaction, files, arrays=arrays)
    finally:
        _arrays.to_host.release(snapshot.arrays)
