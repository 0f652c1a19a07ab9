"""Processes of a job: messages, heartbeats and joint operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._distributed import agreement, messages, operation, peer_files

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
