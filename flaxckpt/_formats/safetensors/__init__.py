"""Reads and writes safetensors: a single file, or shards with an index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._formats.safetensors import header, reader, writer

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
