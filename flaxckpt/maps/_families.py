"""All families."""

from __future__ import annotations

from flaxckpt.maps._family import Family
from flaxckpt.maps._llama import LLAMA

FAMILIES: tuple[Family, ...] = (LLAMA,)
