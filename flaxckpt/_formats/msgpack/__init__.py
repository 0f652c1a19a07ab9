"""Reads and writes Flax's msgpack files, and reads streams of msgpack records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._formats.msgpack import writer

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
