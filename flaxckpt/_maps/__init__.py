"""The tables of `flaxckpt.maps`, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._maps import detect, families, family, gguf, model_config, named, peft

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
