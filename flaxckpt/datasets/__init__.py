"""Saves and restores the state of dataset iterators.

An iterator is recognised by its methods and its class's module, without importing its
framework. Its state is taken at the call of `save` and committed together with the
arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt.datasets._adapters import position as position
    from flaxckpt.datasets._buffered import Buffered
    from flaxckpt.datasets._diagnostics import Standstill as Standstill
    from flaxckpt.datasets._files import DESCRIPTION as DESCRIPTION
    from flaxckpt.datasets._files import set_state as set_state
    from flaxckpt.datasets._files import state_files as state_files
    from flaxckpt.datasets._iterators import Restarting, SaveableIterator, StepIndexed
    from flaxckpt.datasets._iterators import copy_position as copy_position
    from flaxckpt.datasets._json_codec import MAX_STATE_BYTES as MAX_STATE_BYTES
    from flaxckpt.datasets._names import is_state_name as is_state_name

__all__ = ["Buffered", "Restarting", "SaveableIterator", "StepIndexed"]

_HOMES = {
    "Buffered": "_buffered",
    "DESCRIPTION": "_files",
    "MAX_STATE_BYTES": "_json_codec",
    "Restarting": "_iterators",
    "SaveableIterator": "_iterators",
    "Standstill": "_diagnostics",
    "StepIndexed": "_iterators",
    "copy_position": "_iterators",
    "is_state_name": "_names",
    "position": "_adapters",
    "set_state": "_files",
    "state_files": "_files",
}
"""Function or class that other packages may use -> its module."""

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__, names=_HOMES)
