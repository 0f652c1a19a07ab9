"""The protocol of readers, and the classes of their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from flaxckpt import _state, _storage
from flaxckpt._state.leaf import LeafInfo, LeafTable
from flaxckpt._types import JSON, LeafPath
from flaxckpt.formats._native.items import Items


class Lineage(NamedTuple):
    """The checkpoint at the start of a run.

    Attributes:
        path: Path of the checkpoint at that time.
        step: Step number in a run directory; None for a single checkpoint.
        digest: Digest of the file that describes the checkpoint, or of the whole
            checkpoint; None if too large to read.
        transforms: The transforms applied to the checkpoint, as text.
    """

    path: str
    step: int | None
    digest: str | None
    transforms: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """Metadata of a checkpoint, read without its arrays.

    Attributes:
        path: The checkpoint, a directory or a file.
        format: `flaxckpt`, `orbax`, `t5x`, `msgpack`, `streaming`, `safetensors` or
            `npz`.
        step: Step number in a run directory; None for a single checkpoint.
        leaves: Leaf path -> leaf info, in the order of the state.
        metrics: Metrics of the step.
        created: Time of the start of the save, in seconds since 1970; None if not
            recorded.
        committed: Time of the commit, likewise.
        custom: The user's own `metadata=`.
        has_dataset: True if the state of a dataset iterator was saved.
        total_bytes: Size of all arrays, uncompressed.
        lineage: Checkpoints that the run started from, the nearest first.
        transforms: The transforms applied on saving, as text.
        items: The items with arrays; empty for a format without items.
        deleted_items: The items that retention or `Checkpointer.delete` removed.
        json: JSON item -> content.
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
    items: tuple[str, ...] = ()
    deleted_items: tuple[str, ...] = ()
    json: Mapping[str, JSON] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint opened by a reader, its arrays unread.

    Attributes:
        metadata: The metadata of the checkpoint.
        table: Leaf path -> leaf that can be opened.
        structure: The containers, with their exact types if the format records them.
        unknown_types: Classes in `structure` that become plain dicts or lists.
        digests: Relative path -> recorded digest of the file.
        stamp: Stamp of the file that describes the checkpoint, to notice a
            replacement.
        recorded_step: Step number at the save; None if not recorded.
        items: The items with the arrays and the dataset.
        left_out: Item without leaves in the table -> the reason.
        own_items: Item of an Orbax step in our own format -> the item opened alone.
    """

    metadata: CheckpointMetadata
    table: LeafTable
    structure: _state.tree.Node | LeafPath
    unknown_types: frozenset[str] = frozenset()
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stamp: _storage.Stamp | None = None
    recorded_step: int | None = None
    items: Items = dataclasses.field(default_factory=Items)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    own_items: Mapping[str, Stored] = dataclasses.field(default_factory=dict)


class Reader(Protocol):
    """Recognises and reads a format."""

    def recognises(self, path: Path) -> str | None:
        """Returns the evidence for a checkpoint of this format; None if not one.

        Looks at file names and the first bytes of a file.
        """
        ...

    def read(
        self, path: Path, *, step: int | None, resolve: _state.treedef.Resolve
    ) -> Stored:
        """Reads everything but arrays."""
        ...
