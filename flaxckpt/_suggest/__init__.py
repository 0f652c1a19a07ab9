"""Guesses the transforms between two layouts of a model, from names and shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._suggest import suggestion

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
