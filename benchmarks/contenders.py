"""The checkpointers that are compared, behind one interface.

Each contender imports its library only when it opens a directory, so a process that
measures one contender has not imported the others.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import flaxckpt
from benchmarks.samples import Settings, Skip
from benchmarks.states import PyTree


class Session:
    """A contender that works in a directory of steps, `<directory>/<step>`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, step: int, state: PyTree) -> None:
        """Saves `state`; returns as soon as the contender returns to its caller."""
        raise NotImplementedError

    def wait(self) -> None:
        """Returns when the contender reports the save as complete."""

    def restore(self, step: int, abstract_state: PyTree) -> PyTree:
        """Returns the step as jax arrays in the structure of `abstract_state`."""
        raise NotImplementedError

    def latest_step(self) -> int | None:
        """Returns the newest step."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes threads and files."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A checkpointer, with options.

    Attributes:
        name: The name in reports.
        open: Opens a directory, which may have steps.
        package: The package that it needs.
        restores: True if it can restore.
        restores_parts: True if it can also restore a part of a state.
    """

    name: str
    open: Callable[[Path], Session]
    package: str = "flaxckpt"
    restores: bool = True
    restores_parts: bool = False

    def obstacle(self) -> str:
        """Returns the reason why it cannot run here; empty if it can."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return ""


def select(
    case: str, names: Sequence[str], settings: Settings
) -> tuple[dict[str, Contender], list[Skip]]:
    """Returns the contenders of `names` that can run, by name, and the others."""
    selected: dict[str, Contender] = {}
    skips = []
    for name in names:
        if settings.contenders and name not in settings.contenders:
            continue
        if obstacle := CONTENDERS[name].obstacle():
            skips.append(Skip(case, name, obstacle))
        else:
            selected[name] = CONTENDERS[name]
    return selected, skips


# ---- flaxckpt -------------------------------------------------------------------


class Flaxckpt(Session):
    """Saves with `Checkpointer` and restores with `load`.

    Args:
        directory: The directory of steps.
        layout: The array layout.
        load_options: Further arguments of `load`.
        snapshot: The memory of copies of arrays on accelerators.
    """

    def __init__(
        self,
        directory: Path,
        layout: flaxckpt.ArrayLayout | None = None,
        load_options: Mapping[str, Any] | None = None,
        snapshot: Literal["host", "device"] = "host",
    ) -> None:
        super().__init__(directory)
        self._checkpointer = flaxckpt.Checkpointer(
            directory, layout=layout, snapshot=snapshot
        )
        self._load_options = load_options or {}

    def save(self, step: int, state: PyTree) -> None:
        self._checkpointer.save(step, state)

    def wait(self) -> None:
        self._checkpointer.wait()

    def restore(self, step: int, abstract_state: PyTree) -> PyTree:
        return flaxckpt.load(
            self.directory, abstract_state, step=step, **self._load_options
        )

    def latest_step(self) -> int | None:
        return self._checkpointer.latest_step()

    def close(self) -> None:
        self._checkpointer.close()


def _compact(directory: Path) -> Session:
    return Flaxckpt(directory, flaxckpt.ArrayLayout(codec="compact"))


def _unmapped(directory: Path) -> Session:
    return Flaxckpt(directory, load_options={"memory_map": False})


def _device(directory: Path) -> Session:
    return Flaxckpt(directory, snapshot="device")


class Pageable(Flaxckpt):
    """Transfers arrays from accelerators to pageable memory, never to pinned memory."""

    def __init__(
        self, directory: Path, snapshot: Literal["host", "device"] = "host"
    ) -> None:
        super().__init__(directory, snapshot=snapshot)
        self._no_pinned = mock.patch(
            "flaxckpt._arrays.to_host._pinned", return_value=None
        )
        self._no_pinned.start()

    def close(self) -> None:
        super().close()
        self._no_pinned.stop()


def _device_pageable(directory: Path) -> Session:
    return Pageable(directory, snapshot="device")


# ---- Orbax ----------------------------------------------------------------------


class OrbaxV0(Session):
    """A `CheckpointManager` with default options, which saves asynchronously.

    Args:
        directory: The directory of steps.
        compressed: True to compress arrays, as by default.
    """

    def __init__(self, directory: Path, *, compressed: bool = True) -> None:
        super().__init__(directory)
        import orbax.checkpoint as ocp

        self._manager = (
            ocp.CheckpointManager(directory)
            if compressed
            else ocp.CheckpointManager(
                directory,
                item_handlers=ocp.PyTreeCheckpointHandler(use_compression=False),
            )
        )
        self._compressed = compressed
        self._args = ocp.args
        self._restore_args = ocp.checkpoint_utils.construct_restore_args

    def save(self, step: int, state: PyTree) -> None:
        save = self._args.StandardSave if self._compressed else self._args.PyTreeSave
        if not self._manager.save(step, args=save(state)):
            raise RuntimeError(f"Orbax did not save step {step}")

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, step: int, abstract_state: PyTree) -> PyTree:
        args = (
            self._args.StandardRestore(abstract_state)
            if self._compressed
            else self._args.PyTreeRestore(
                abstract_state, self._restore_args(abstract_state)
            )
        )
        return self._manager.restore(step, args=args)

    def latest_step(self) -> int | None:
        step: int | None = self._manager.latest_step()
        return step

    def close(self) -> None:
        self._manager.close()


def _uncompressed(directory: Path) -> Session:
    return OrbaxV0(directory, compressed=False)


class OrbaxV1(Session):
    """The functions of Orbax's v1 API."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from orbax.checkpoint import v1

        self._orbax = v1
        self._pending: Any = None

    def save(self, step: int, state: PyTree) -> None:
        self._pending = self._orbax.save_async(self.directory / str(step), state)

    def wait(self) -> None:
        self._pending.result()

    def restore(self, step: int, abstract_state: PyTree) -> PyTree:
        return self._orbax.load(self.directory / str(step), abstract_state)


# ---- plain files ----------------------------------------------------------------

_PART_BYTES = 64 * 2**20
"""Bytes of a file of `RawWrite`."""

_CALL_BYTES = 2**18
"""Bytes that `RawWrite` writes in a call, which takes the least time."""


class OneFile(Session):
    """A file for all leaves, synced before `save` returns."""

    def save(self, step: int, state: PyTree) -> None:
        path = self.directory / str(step)
        arrays = {name: np.asarray(leaf) for name, leaf in _named_leaves(state)}
        self._write(path, arrays)
        for target in (path, self.directory):
            _sync(target)

    def restore(self, step: int, abstract_state: PyTree) -> PyTree:
        arrays = self._read(self.directory / str(step))
        leaves = [
            jnp.asarray(arrays[name]) for name, _ in _named_leaves(abstract_state)
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)

    def _write(self, path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        raise NotImplementedError

    def _read(self, path: Path) -> Mapping[str, np.ndarray[Any, Any]]:
        raise NotImplementedError


def _named_leaves(state: PyTree) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]


class Safetensors(OneFile):
    """safetensors for numpy."""

    def _write(self, path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        import safetensors.numpy

        safetensors.numpy.save_file(arrays, path)

    def _read(self, path: Path) -> Mapping[str, np.ndarray[Any, Any]]:
        import safetensors.numpy

        arrays: Mapping[str, np.ndarray[Any, Any]] = safetensors.numpy.load_file(path)
        return arrays


class NumpySavez(OneFile):
    """`numpy.savez`."""

    def _write(self, path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    def _read(self, path: Path) -> Mapping[str, np.ndarray[Any, Any]]:
        with np.load(path) as file:
            return dict(file)


class RawWrite(Session):
    """Writes only the bytes, by two threads, and syncs them: the speed of the disk."""

    def save(self, step: int, state: PyTree) -> None:
        directory = self.directory / str(step)
        directory.mkdir()
        parts = [
            part
            for _, leaf in _named_leaves(state)
            for part in _split(np.ravel(leaf).view(np.uint8).data)
        ]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            names = [directory / str(number) for number in range(len(parts))]
            list(pool.map(_write_and_sync, names, parts))
        for path in (directory, self.directory):
            _sync(path)


def _split(content: memoryview) -> list[memoryview]:
    return [content[i : i + _PART_BYTES] for i in range(0, len(content), _PART_BYTES)]


def _write_and_sync(path: Path, content: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), _CALL_BYTES):
            file.write(content[start : start + _CALL_BYTES])
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("flaxckpt", Flaxckpt, restores_parts=True),
        Contender("flaxckpt unmapped", _unmapped),
        Contender("flaxckpt compact", _compact),
        Contender("flaxckpt pageable", Pageable),
        Contender("flaxckpt device", _device),
        Contender("flaxckpt device pageable", _device_pageable),
        Contender("orbax", OrbaxV0, "orbax"),
        Contender("orbax uncompressed", _uncompressed, "orbax"),
        Contender("orbax v1", OrbaxV1, "orbax"),
        Contender("safetensors", Safetensors, "safetensors"),
        Contender("numpy savez", NumpySavez),
        Contender("raw write", RawWrite, restores=False),
    )
}

OF_LARGE_STATES = (
    "flaxckpt",
    "flaxckpt unmapped",
    "flaxckpt compact",
    "orbax",
    "orbax uncompressed",
    "orbax v1",
    "safetensors",
)
"""The contenders that save and restore a large state on a CPU."""
