"""All families."""

from __future__ import annotations

from flaxckpt.maps._family import Family
from flaxckpt.maps._gemma import GEMMA
from flaxckpt.maps._gemma2 import GEMMA2
from flaxckpt.maps._gemma3 import GEMMA3
from flaxckpt.maps._llama import LLAMA
from flaxckpt.maps._mistral import MISTRAL
from flaxckpt.maps._mixtral import MIXTRAL
from flaxckpt.maps._qwen2 import QWEN2
from flaxckpt.maps._qwen3 import QWEN3
from flaxckpt.maps._qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (
    GEMMA,
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
)
