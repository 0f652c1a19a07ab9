"""The modules of `flaxckpt.transforms`, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._transforms import (
        affine,
        axis_form,
        base,
        export,
        from_text,
        indexed_names,
        lora,
        mirrors,
        patterns,
        remap,
        rows,
        tie,
    )

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
