"""The steps of a run directory: names, markers, journal of events, deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._steps import delete, event, index, journal, markers, names

__all__ = ["delete", "event", "index", "journal", "markers", "names"]

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__, __all__)
