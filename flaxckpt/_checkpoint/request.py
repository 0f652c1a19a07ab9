"""Records of a save: the options, the request, and the snapshot of the state."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flaxckpt import _arrays, _distributed, _util
from flaxckpt._arrays.zarr.array_layout import ArrayLayout
from flaxckpt._types import JSON
from flaxckpt.formats import _native
from flaxckpt.formats._reader import Lineage
from flaxckpt.transforms import Transform


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options for writing states, shared by all saves of a run.

    Attributes:
        layout: Chunks and encoding of arrays.
        transforms: Changes to apply to the state before writing.
        max_concurrent_bytes: Memory budget of the writing thread.
    """

    layout: ArrayLayout = dataclasses.field(default_factory=ArrayLayout)
    transforms: Sequence[Transform] = ()
    max_concurrent_bytes: int = _arrays.write.DEFAULT_CONCURRENT_BYTES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Arguments of a save, without the state.

    A request lives until the save is durable, but the state is freed as soon as its
    values are copied.

    Attributes:
        path: Path of the new checkpoint.
        options: Options shared with other saves.
        step: Step number, or None for a single checkpoint.
        metrics: Measured numbers by name.
        metadata: The user's JSON.
        dataset: A dataset iterator, or None.
        on_exists: The action if the step exists; only a run skips steps.
        temporary: Whether to delete the step once there is a newer step.
        lineage: Origins of the run, the nearest first.
        started: Monotonic time of the call.
        planned: Called with the size of the planned save, before copying any values.
        count: Called with the size of values after they are written.
        together: The operation of all processes; None for a single process.
        marks: Step markers to write: file name -> content.
    """

    path: Path
    options: SaveOptions = dataclasses.field(default_factory=SaveOptions)
    step: int | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    dataset: Any = None
    on_exists: Literal["error", "skip", "overwrite"] = "error"
    temporary: bool = False
    lineage: Sequence[Lineage] = ()
    started: float = dataclasses.field(default_factory=time.monotonic)
    planned: Callable[..., object] | None = None
    count: _arrays.write.Count = _util.progress.ignore
    together: _distributed.operation.Operation | None = None
    marks: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def overwrite(self) -> bool:
        """True if the save replaces an existing checkpoint."""
        return self.on_exists == "overwrite"

    @property
    def number(self) -> int:
        """Step number of a save by a run."""
        assert self.step is not None
        return self.step

    def elapsed(self) -> float:
        """Returns the seconds since the call."""
        return time.monotonic() - self.started


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The values of a state at the call of `save`, ready to be written.

    Attributes:
        request: Arguments of the save.
        contents: All parts of the checkpoint except the arrays.
        arrays: The values that this process writes.
    """

    request: SaveRequest
    contents: _native.checkpoint.Contents
    arrays: tuple[_arrays.to_host.HostArray, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in memory of the values written by this process."""
        return sum([array.nbytes for array in self.arrays])

    @property
    def stored_bytes(self) -> int:
        """Uncompressed bytes of all arrays of all processes in their storage type."""
        return sum(
            _arrays.layout.stored_bytes(info)
            for info in self.contents.infos
            if info.chunk_shape is not None
        )
