"""`CheckpointCallback`: when a training loop saves, stops and resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._training import callback

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
