"""Checkpoints without recorded containers: dicts and lists of leaves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flaxckpt import _state, _storage, _util, errors
from flaxckpt._formats.reader import CheckpointMetadata, Stored
from flaxckpt._state.leaf import EMPTY_STATE, Leaf, LeafTable, StoredLeaf
from flaxckpt._types import JSON, LeafPath, Shape

if TYPE_CHECKING:
    import tensorstore as ts


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """An array that `open` opens; `chunk_shape` is the smallest part that is read."""

    shape: Shape
    dtype: str
    chunk_shape: Shape
    open: Callable[[ts.Context], ts.Future[ts.TensorStore]]
    check: Callable[[], None] | None = None


def make_stored(
    path: Path,
    table: LeafTable,
    *,
    format_name: str,
    step: int | None,
    stamp: _storage.Stamp,
    custom: Mapping[str, JSON] | None = None,
) -> Stored:
    """Returns the checkpoint of a leaf table; `stamp` is from before the read."""
    if not table:
        table = {"": Leaf(EMPTY_STATE, (StoredLeaf(path, EMPTY_STATE),))}
    infos = [leaf.info for leaf in table.values()]
    return Stored(
        CheckpointMetadata(
            str(path),
            format_name,
            step,
            {info.path: info for info in infos},
            custom=custom or {},
            total_bytes=sum(info.stored_bytes for info in infos),
            unsupported={
                path: leaf.unsupported.form
                for path, leaf in table.items()
                if leaf.unsupported is not None
            },
        ),
        table,
        _state.tree.plain_structure(
            (i.path, i.keys, i.python_type if i.kind == "empty" else None)
            for i in infos
        ),
        stamp=stamp,
    )


@contextlib.contextmanager
def fault_recorded(faults: dict[LeafPath, str], leaf: LeafPath) -> Iterator[None]:
    """Records why a leaf cannot be read; files without permission stay errors."""
    try:
        yield
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        faults[leaf] = errors.one_line(error, 200)


def unreadable_error(
    path: Path, faults: Mapping[LeafPath, str]
) -> errors.DamagedCheckpointError:
    """Returns the error for leaves that cannot be read, with their faults."""
    count = _util.humanize.count(len(faults), "leaf", "leaves")
    return errors.DamagedCheckpointError(
        f"{count} of {path} cannot be read:\n"
        + errors.rows(f"{name}: {reason}" for name, reason in faults.items())
        + "\nRestore another step."
    )
