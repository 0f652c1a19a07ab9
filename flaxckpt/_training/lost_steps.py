"""Warnings at the end of the program about last steps that were not saved."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import TYPE_CHECKING

from flaxckpt._run.checkpointer import session_of

if TYPE_CHECKING:
    from flaxckpt._training.callback import CheckpointCallback

_log = logging.getLogger(__name__)

_begun: weakref.WeakSet[CheckpointCallback] = weakref.WeakSet()
"""Callbacks that have started and are not closed."""


def watch(callback: CheckpointCallback) -> None:
    """Warns at the end of the program if `callback` has a last step to save."""
    _begun.add(callback)


def forget(callback: CheckpointCallback) -> None:
    _begun.discard(callback)


@atexit.register
def _warn() -> None:
    for callback in list(_begun):
        last = callback.step_to_save()
        saves = session_of(callback.checkpointer).saves
        if last is not None and not saves.has_saved(last.step):
            _log.warning(
                "the program ends without saving step %d: close the Checkpointer or the"
                " CheckpointCallback, preferably with a with block",
                last.step,
            )
