"""The tiers of a run: staging, uploads to the run directory, and copies at peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._run.tiers import parts, staging

__all__ = ["parts", "staging"]

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__, __all__)
