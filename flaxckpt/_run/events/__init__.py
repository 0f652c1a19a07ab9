"""Delivery of the events of a run: the stream, and the sinks of users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._run.events import sinks, stream

__all__ = ["sinks", "stream"]

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__, __all__)
