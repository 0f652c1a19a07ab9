"""Restoring: plan against the wanted state, then read exactly what was planned."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding

from flaxckpt import (
    _arrays,
    _dtypes,
    _flax,
    _steps,
    _storage,
    _tree,
    datasets,
    errors,
    formats,
)
from flaxckpt._info import CheckpointMetadata, LeafInfo, LeafTable, Stored, StoredLeaf
from flaxckpt._types import LeafPath, PathLike, PyTree
from flaxckpt.errors import Mismatch
from flaxckpt.formats import _orbax

_log = logging.getLogger(__name__)

_NEAREST_AMONG = 5_000


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What to do where state and checkpoint differ.

    Attributes:
        missing: What to do about leaves that the checkpoint lacks.
        unused: What to do about leaves that only the checkpoint has.
        max_concurrent_bytes: Bytes that are read at one time.
    """

    missing: Literal["error", "init"] = "error"
    unused: Literal["warn", "error", "ignore"] = "warn"
    max_concurrent_bytes: int = _arrays.DEFAULT_CONCURRENT_BYTES

    def __post_init__(self) -> None:
        for name, allowed in (
            ("missing", ("error", "init")),
            ("unused", ("warn", "error", "ignore")),
        ):
            if getattr(self, name) not in allowed:
                raise errors.OptionError(
                    f"{name} must be one of {allowed}, got {getattr(self, name)!r}"
                )


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a restore will do.

    Attributes:
        jobs: Arrays to read.
        given: Leaf path -> value that needs no reading.
        flat: The wanted state; None to build what the checkpoint describes.
        structure: The containers of the result if `flat` is None.
    """

    jobs: tuple[_arrays.ReadJob, ...]
    given: Mapping[LeafPath, Any]
    flat: _flax.FlatState | None
    structure: _tree.Node | LeafPath


# ---- public functions -----------------------------------------------------------


def load(
    path: PathLike,
    abstract_state: PyTree | None = None,
    *,
    step: int | None = None,
    missing: Literal["error", "init"] = "error",
    unused: Literal["warn", "error", "ignore"] = "warn",
) -> PyTree:
    """Loads a state from a checkpoint that flaxckpt or Orbax wrote.

    Args:
        path: A checkpoint, or a run directory of steps.
        abstract_state: What to load, as a state whose leaves are arrays or
            `jax.ShapeDtypeStruct`s: its classes, shapes, dtypes and shardings are
            what you get. A smaller state loads less: `{"params": ...}` reads the
            parameters only. Without it, a checkpoint of flaxckpt gives back the
            classes that were saved, one of Orbax dicts and lists.
        step: Which step of a run directory; by default the newest.
        missing: What to do about leaves that the checkpoint lacks: raise, or keep
            those of `abstract_state`, which must then hold values.
        unused: What to do about leaves of the checkpoint that are not asked for:
            log a warning (if others beside them are), raise, or nothing.

    Returns:
        A state like `abstract_state`, every leaf filled. Arrays without a sharding
        are on the default device, free to move.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        CheckpointFormatError: What is there is no checkpoint.
        DamagedCheckpointError: Parts of it are missing or fail their checksum.
        RestoreMismatchError: It does not fit `abstract_state`; all leaves are named.
    """
    options = Options(missing, unused)
    found, number = locate(_storage.resolve(path), step)
    return restore(read_stored(found, number), abstract_state, options)


def metadata(path: PathLike, *, step: int | None = None) -> CheckpointMetadata:
    """Describes a checkpoint without reading any array.

    Args:
        path: A checkpoint, or a run directory of steps.
        step: Which step of a run directory; by default the newest.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        CheckpointFormatError: What is there is no checkpoint.
        DamagedCheckpointError: Its description is missing or has changed.
    """
    found, number = locate(_storage.resolve(path), step)
    return read_stored(found, number).metadata


# ---- finding --------------------------------------------------------------------


def locate(path: Path, step: int | None) -> tuple[Path, int | None]:
    """The checkpoint that `path` and `step` mean, and its number if it is a step."""
    if step is None and path.exists() and formats.recognises(path):
        return path, None
    if not path.is_dir():
        formats.detect(path)  # raises
    steps = {n: p for n, p in _steps.find(path).items() if formats.recognises(p)}
    if step is not None:
        if step not in steps:
            raise errors.CheckpointNotFoundError(
                f"{path} has no step {step}: it has {summary(list(steps))}"
            )
        return steps[step], step
    if not steps:
        formats.detect(path)  # raises
    newest = max(steps)
    return steps[newest], newest


def summary(steps: list[int]) -> str:
    """A few words on which steps there are."""
    if not steps:
        return "no steps"
    shown = ", ".join(str(step) for step in steps[-5:])
    return (
        f"{len(steps)} steps, the newest {shown}"
        if len(steps) > 5
        else f"steps {shown}"
    )


def read_stored(path: Path, step: int | None) -> Stored:
    """Reads everything of a checkpoint but its arrays."""
    return formats.detect(path).read(path, step=step, resolve=_flax.resolve)


# ---- planning and doing ---------------------------------------------------------


def restore(stored: Stored, abstract_state: PyTree | None, options: Options) -> PyTree:
    """Loads what `abstract_state` asks for, or everything."""
    start = time.monotonic()
    flat = None if abstract_state is None else _flax.flatten(abstract_state)
    planned = _plan_all(stored) if flat is None else _plan(stored, flat, options)
    state = _execute(planned, options)
    _log.info(
        "restored %s: %d of %d leaves, %d bytes in %.3f s",
        stored.metadata.path,
        len(planned.jobs),
        len(stored.table),
        sum(_arrays.stored_bytes(job.found) for job in planned.jobs),
        time.monotonic() - start,
    )
    return state


def restore_dataset(stored: Stored, iterator: Any) -> None:
    """Puts a dataset iterator where the one saved with the state stood.

    Raises:
        DatasetStateError: None was saved, or the iterator does not take its state.
    """
    path = Path(stored.metadata.path)
    files = _orbax.read_dataset(path, stored.digests)
    if not files:
        raise errors.DatasetStateError(
            f"{path} was saved without a dataset iterator, so the data cannot go on"
            " where it stood; pass dataset=None to start it from the beginning"
        )
    datasets.set_state(iterator, files, path=path)


def _execute(planned: Plan, options: Options) -> PyTree:
    values = dict(planned.given)
    values |= _arrays.read(
        planned.jobs, max_concurrent_bytes=options.max_concurrent_bytes
    )
    if planned.flat is not None:
        return planned.flat.rebuild(values)
    return _tree.unflatten(planned.structure, values)


def _plan_all(stored: Stored) -> Plan:
    """Everything, as the checkpoint describes it."""
    if stored.unknown_types:
        _log.warning(
            "%s holds classes that are not known here and become dicts: %s;"
            " pass an abstract state to get them back",
            stored.metadata.path,
            ", ".join(sorted(stored.unknown_types)),
        )
    given: dict[LeafPath, Any] = {}
    jobs = []
    mismatches = []
    for path, leaf in stored.table.items():
        source = leaf.source
        assert isinstance(source, StoredLeaf), path
        if leaf.info.kind == "string":
            given[path] = source.value
        elif leaf.info.dtype is not None:
            if problem := _needs_x64(leaf.info):
                mismatches.append(problem)
            jobs.append(_arrays.ReadJob(source, leaf.info, leaf.info))
    if mismatches:
        raise errors.RestoreMismatchError(
            stored.metadata.path,
            mismatches,
            "Set jax_enable_x64, or pass an abstract state with numpy leaves.",
        )
    return Plan(tuple(jobs), given, None, stored.structure)


def _needs_x64(info: LeafInfo) -> Mismatch | None:
    if info.kind != "array" or info.python_type != "jax.Array":
        return None
    usable = jax.dtypes.canonicalize_dtype(_dtypes.to_numpy(info.dtype or "")).name
    if usable == info.dtype:
        return None
    return Mismatch(info.path, f"at most {usable}, as jax is configured", str(info))


def _plan(stored: Stored, flat: _flax.FlatState, options: Options) -> Plan:
    given: dict[LeafPath, Any] = {}
    jobs = []
    mismatches = []
    used: set[LeafPath] = set()
    for path, wanted in flat.table.items():
        if wanted.info.kind == "empty":
            continue
        found_path = _match(path, stored.table)
        if found_path is None:
            if options.missing == "init" and not _is_abstract(wanted.source):
                given[path] = wanted.source
            else:
                mismatches.append(_missing(wanted.info, stored.table, options))
            continue
        used.add(found_path)
        found = stored.table[found_path]
        source = found.source
        assert isinstance(source, StoredLeaf), found_path
        if problem := _misfit(wanted.info, found.info):
            mismatches.append(problem)
        elif wanted.info.kind == "string":
            given[path] = source.value
        else:
            jobs.append(_arrays.ReadJob(source, found.info, wanted.info))
    unused = [
        path
        for path, leaf in stored.table.items()
        if path not in used and leaf.info.kind != "empty"
    ]
    if options.unused == "error":
        mismatches += [
            Mismatch(path, "nothing", str(stored.table[path].info)) for path in unused
        ]
    if mismatches:
        raise errors.RestoreMismatchError(
            stored.metadata.path, mismatches, _advice(mismatches)
        )
    if options.unused == "warn":
        _warn_unused(stored, flat, unused)
    return Plan(tuple(jobs), given, flat, flat.structure)


def _match(path: LeafPath, table: LeafTable) -> LeafPath | None:
    """The stored leaf for `path`; Orbax ends those of boxes and NNX in `/value`."""
    for candidate in (path, f"{path}/value"):
        if candidate in table and table[candidate].info.kind != "empty":
            return candidate
    return None


def _is_abstract(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _missing(wanted: LeafInfo, table: LeafTable, options: Options) -> Mismatch:
    found = "nothing"
    if wanted.path in table:
        found = str(table[wanted.path].info)
    elif len(table) <= _NEAREST_AMONG:
        near = difflib.get_close_matches(wanted.path, table, n=1)
        found = f"nothing (nearest: {near[0]})" if near else found
    if options.missing == "init":
        found += ", and no value to start from"
    return Mismatch(wanted.path, str(wanted), found)


def _misfit(wanted: LeafInfo, found: LeafInfo) -> Mismatch | None:
    """Says how `found` does not fit `wanted`; None if it does."""
    if _fits(wanted, found):
        return _sharding_misfit(wanted, found)
    return Mismatch(wanted.path, str(wanted), str(found))


def _fits(wanted: LeafInfo, found: LeafInfo) -> bool:
    if wanted.kind == "string" or found.kind == "string":
        return wanted.kind == found.kind
    if wanted.kind == "prng_key":
        if found.kind == "prng_key":
            return wanted.shape == found.shape and wanted.prng_impl == found.prng_impl
        # Raw key data, as Orbax has it without its array_metadatas.
        shape, dtype = _arrays.stored_form(wanted)
        return found.shape == shape and found.dtype == dtype
    if found.kind == "prng_key" or wanted.shape != found.shape:
        return False
    assert wanted.dtype is not None
    assert found.dtype is not None
    if wanted.kind == "scalar" or found.kind == "scalar":
        # A Python number has no width; whether it fits is seen when it is read.
        return _number_kind(wanted.dtype) == _number_kind(found.dtype)
    return _dtypes.restores_as(found.dtype, wanted.dtype)


def _number_kind(dtype: str) -> str:
    return _dtypes.kind(dtype).removeprefix("u")


def _sharding_misfit(wanted: LeafInfo, found: LeafInfo) -> Mismatch | None:
    """Says why the wanted sharding cannot be had; None if it can."""
    sharding = wanted.sharding
    if sharding is None:
        return None
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        asked = f"{wanted} on the mesh {dict(sharding.mesh.shape)} without devices"
        return Mismatch(wanted.path, asked, str(found))
    try:
        sharding.shard_shape(wanted.shape)
    except ValueError:
        asked = f"{wanted} split as {wanted.spec}, which does not divide it"
        return Mismatch(wanted.path, asked, str(found))
    return None


def _advice(mismatches: list[Mismatch]) -> str:
    if any(m.wanted == "nothing" for m in mismatches):
        return 'Ask for these leaves too, or pass unused="ignore".'
    if all(m.found.startswith("nothing") for m in mismatches):
        return (
            "Ask only for leaves that the checkpoint has, or pass a state with values"
            ' and missing="init" to keep them.'
        )
    return (
        "Change the state to fit; floating types are cast, integers only widened, and"
        " shapes must agree."
    )


def _warn_unused(stored: Stored, flat: _flax.FlatState, unused: list[LeafPath]) -> None:
    """Warns of leaves left behind, unless their whole branch was not asked for."""
    asked = {path.split("/")[0] for path in flat.table}
    beside = [path for path in unused if path.split("/")[0] in asked]
    if beside:
        _log.warning(
            "%d leaves of %s are not in the state and stay unread: %s%s",
            len(beside),
            stored.metadata.path,
            ", ".join(beside[:5]),
            ", …" if len(beside) > 5 else "",
        )
