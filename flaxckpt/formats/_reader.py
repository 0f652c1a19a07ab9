"""What a reader finds, and the protocol of readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from flaxckpt import _state, _storage
from flaxckpt._state.leaf import LeafInfo, LeafTable
from flaxckpt._types import JSON, LeafPath


class Lineage(NamedTuple):
    """A checkpoint from which a run began.

    Attributes:
        path: Where it was.
        step: Which step of a run directory; None if it stood alone.
        digest: Checksum of the file that describes it, or of all of it; None if that
            is too large to read.
        transforms: What was changed in it, as text.
    """

    path: str
    step: int | None
    digest: str | None
    transforms: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """All that is known of a checkpoint without reading an array.

    Attributes:
        path: The checkpoint, a directory or a file.
        format: `flaxckpt`, or whose it is else: `orbax`, `t5x`, `msgpack`, `streaming`,
            `safetensors` or `npz`.
        step: Its number under a run directory; None if it stands alone.
        leaves: Leaf path -> what is known of it, in the order of the state.
        metrics: What was measured at this step.
        created: When the save began, in seconds since 1970; None if not recorded.
        committed: When it was committed, likewise.
        custom: The user's own `metadata=`.
        has_dataset: Whether it has the state of a dataset iterator.
        total_bytes: Size of all arrays, uncompressed.
        lineage: What the run began from, the nearest first.
        transforms: What was changed when it was saved, as text.
    """

    path: str
    format: str
    step: int | None
    leaves: Mapping[LeafPath, LeafInfo]
    metrics: Mapping[str, float]
    created: float | None
    committed: float | None
    custom: Mapping[str, JSON]
    has_dataset: bool
    total_bytes: int
    lineage: tuple[Lineage, ...] = ()
    transforms: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint as a reader found it, arrays unread.

    Attributes:
        metadata: All but the values.
        table: Leaf path -> leaf that can be opened.
        structure: Its containers, with their exact types if the format records them.
        unknown_types: Classes in `structure` that become plain dicts or lists.
        digests: Relative path -> digest that was written down for a file.
        stamp: The file that describes it; another one means another checkpoint.
        recorded_step: The step that it was saved as; None if that is not recorded.
    """

    metadata: CheckpointMetadata
    table: LeafTable
    structure: _state.tree.Node | LeafPath
    unknown_types: frozenset[str] = frozenset()
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stamp: _storage.local.Stamp | None = None
    recorded_step: int | None = None


class Reader(Protocol):
    """Knows one format."""

    def recognises(self, path: Path) -> str | None:
        """Why `path` is a checkpoint in this format; None if it is none.

        Judged by names of files and the first bytes of one.
        """
        ...

    def read(
        self, path: Path, *, step: int | None, resolve: _state.treedef.Resolve
    ) -> Stored:
        """Reads everything but arrays."""
        ...
