"""The protocol of readers, and the classes of their results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from flaxckpt import _state, _steps, _storage, errors
from flaxckpt._formats import summary
from flaxckpt._formats.items import Items
from flaxckpt._state.leaf import LeafInfo, LeafTable
from flaxckpt._types import JSON, LeafPath

if TYPE_CHECKING:  # it imports this module
    from flaxckpt._formats.native_manifest import Manifest


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
        format: `flaxckpt`, `orbax`, `t5x`, `msgpack`, `streaming`, `safetensors`,
            `npz`, `gguf` or `big_vision`.
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
        json: JSON item -> content. Looking up a damaged item raises
            DamagedCheckpointError.
        damaged_items: Item that is damaged or missing -> the reason.
        unsupported: Leaf path -> the form of values that flaxckpt does not read, such
            as `quantized as Q4_K`. The leaf cannot be loaded.
    """

    path: str
    format: str
    step: int | None
    leaves: Mapping[LeafPath, LeafInfo]
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    created: float | None = None
    committed: float | None = None
    custom: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    has_dataset: bool = False
    total_bytes: int = 0
    lineage: tuple[Lineage, ...] = ()
    transforms: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    deleted_items: tuple[str, ...] = ()
    json: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    damaged_items: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unsupported: Mapping[LeafPath, str] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return summary.as_text(self)

    def _repr_html_(self) -> str:
        """Returns an HTML card for notebooks."""
        return summary.as_card(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint opened by a reader, its arrays unread.

    Attributes:
        structure: The containers, with their exact types if the format records them.
        unknown_types: Classes in `structure` that become plain dicts or lists.
        stamp: Stamp of the file that describes the checkpoint, to notice a
            replacement.
        left_out: Item that a load of the whole state goes without -> the reason.
        own_items: Item of an Orbax step in our own format -> the item opened alone.
        warnings: Messages for the log of those who open the checkpoint to use it.
    """

    metadata: CheckpointMetadata
    table: LeafTable
    structure: _state.tree.Node | LeafPath
    unknown_types: frozenset[str] = frozenset()
    manifest: Manifest | None = None
    stamp: _storage.Stamp | None = None
    recorded_step: int | None = None
    items: Items = dataclasses.field(default_factory=Items)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    own_items: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def digests(self) -> Mapping[str, str]:
        """Relative path -> recorded digest of the file."""
        return {} if self.manifest is None else self.manifest.digests

    @property
    def step(self) -> int | None:
        """The step number, also of a step opened by its own path; None if unknown."""
        number = self.metadata.step
        if number is None:
            number = self.recorded_step
        if number is None:
            name = _storage.paths.resolve(self.metadata.path).resolve().name
            number = _steps.names.number(name) if _steps.names.is_usual(name) else None
        return number

    @property
    def damaged_branches(self) -> Mapping[LeafPath, str]:
        """Leaf path of a branch of the state -> the item, damaged or missing."""
        branches = (*self.items.trees, *self.left_out)
        return {
            _state.tree.join((_state.tree.Key(item, "key"),)): item
            for item in self.metadata.damaged_items
            if item in branches
        }

    def check_items(self, items: Collection[str]) -> None:
        """Raises DamagedCheckpointError if any of `items` is damaged."""
        damaged = self.metadata.damaged_items
        rows = [f"{item} {damaged[item]}" for item in damaged if item in items]
        if rows:
            raise errors.DamagedCheckpointError(
                f"{self.metadata.path} has damaged items:\n{errors.rows(rows)}\n"
                "The other items can be loaded: pass a state without these."
            )

    def check_leaf(self, leaf_path: LeafPath) -> None:
        """Raises DamagedCheckpointError if a leaf is in a damaged or missing item."""
        branch = leaf_path.partition("/")[0]
        if item := self.damaged_branches.get(branch):
            self.check_items([item])

    def explain_missing(self, leaf_path: LeafPath) -> str | None:
        """Returns why a leaf is not in the table; None if it is in no known item."""
        item = _state.tree.unescape(leaf_path.partition("/")[0])
        if item in self.left_out:
            return f"the item {item} {self.left_out[item]}"
        if self.is_json(item):
            return f"{item} is a JSON item"
        return None

    def is_json(self, item: str) -> bool:
        """Returns True for a JSON item that is not a branch of the state."""
        metadata = self.metadata
        is_known = item in metadata.json or item in metadata.damaged_items
        return is_known and item not in (*self.items.trees, *self.left_out)


class Reader(Protocol):
    def read(
        self, path: Path, *, step: int | None, resolve: _state.treedef.Resolve
    ) -> Stored:
        """Reads everything but arrays."""
        ...


@contextlib.contextmanager
def replacements_reported(
    path: Path | str, stamp: _storage.Stamp | None
) -> Iterator[None]:
    """Reports damage found in the block as a replacement, if there was one."""
    try:
        yield
    except errors.DamagedCheckpointError:
        check_current(path, stamp)
        raise


def check_current(
    path: Path | str, stamp: _storage.Stamp | None, action: str = "load"
) -> None:
    """Raises DamagedCheckpointError if the file was replaced: `action` is to repeat."""
    if stamp is not None and not stamp.is_current():
        raise errors.DamagedCheckpointError(
            f"{path} was replaced or deleted while it was read; {action} it again"
        )
