"""The way back from a training state to the parameters of a published model."""

from __future__ import annotations

import dataclasses
import logging
import os

from flaxckpt import errors
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms import base
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._transforms.mirrors import is_parameter, outside

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Export(TableTransform):
    """Inverts a map from a published model, and leaves out all that is no parameter."""

    map: tuple[Transform, ...]

    def __call__(self, table: LeafTable) -> LeafTable:
        params = without_optimizer(table)
        exported = base.apply(base.undo(self.map, on_restore=True), params)
        if not self.map:
            return exported
        unknown = dict.fromkeys(base.untouched(exported, params))
        known = [path for path in params if path not in unknown]
        if not known:
            raise errors.OptionError(
                "the map has no leaf of the checkpoint:\n"
                f"{errors.rows(params)}\nPass the prefix of the parameters to the map."
            )
        root = os.path.commonpath([path.rpartition("/")[0] for path in known])
        inside = [p for p in unknown if not root or p.startswith(f"{root}/")]
        if inside:
            rows = (f"{path}: {table[path].info}" for path in inside)
            raise errors.OptionError(
                f"the map has no names for leaves in {root or 'the root'} of the"
                f" checkpoint:\n{errors.rows(rows)}\nAdd them to the map, or"
                " leave them out: transforms=[drop(pattern)]."
            )
        if unknown:
            _log.info(
                "not exported, as it is beside %s: %s",
                root,
                errors.first_few(list(unknown)),
            )
        return {path: leaf for path, leaf in exported.items() if path not in unknown}

    def __str__(self) -> str:
        return base.call("export", list(base.describe(self.map)))


def without_optimizer(table: LeafTable) -> LeafTable:
    """Returns the table without optimizer leaves, counters, keys and strings."""
    leaves = outside(table).items()
    return {path: leaf for path, leaf in leaves if is_parameter(leaf.info)}
