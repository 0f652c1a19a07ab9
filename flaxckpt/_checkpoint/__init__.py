"""Save, commit, restore plan, restore and verification of a single checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._checkpoint import (
        commit,
        completeness,
        overwrite,
        plan,
        planner,
        restore,
        save,
        save_distributed,
        save_handle,
        verify,
        verify_report,
    )

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
