"""All families."""

from __future__ import annotations

from flaxckpt.maps._bert import BERT
from flaxckpt.maps._clip import CLIP
from flaxckpt.maps._family import Family
from flaxckpt.maps._gemma import GEMMA
from flaxckpt.maps._gemma2 import GEMMA2
from flaxckpt.maps._gemma3 import GEMMA3
from flaxckpt.maps._gpt2 import GPT2
from flaxckpt.maps._llama import LLAMA
from flaxckpt.maps._mistral import MISTRAL
from flaxckpt.maps._mixtral import MIXTRAL
from flaxckpt.maps._qwen2 import QWEN2
from flaxckpt.maps._qwen3 import QWEN3
from flaxckpt.maps._qwen3_moe import QWEN3_MOE
from flaxckpt.maps._roberta import ROBERTA
from flaxckpt.maps._t5 import T5
from flaxckpt.maps._vit import VIT
from flaxckpt.maps._whisper import WHISPER

FAMILIES: tuple[Family, ...] = (
    BERT,
    CLIP,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    ROBERTA,
    T5,
    VIT,
    WHISPER,
)
