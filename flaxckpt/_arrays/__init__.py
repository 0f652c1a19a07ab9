"""Arrays between devices, host memory and chunk files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._arrays import (
        blockwise,
        evaluate,
        layout,
        lazy,
        leaf_sample,
        read,
        read_files,
        read_once,
        read_plan,
        sample,
        to_device,
        to_host,
        typed_values,
        write,
        written,
    )

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
