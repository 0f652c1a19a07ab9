"""Conversion of a checkpoint to another format or layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._convert import convert, exports

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
