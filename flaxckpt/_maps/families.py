"""All families."""

from __future__ import annotations

from flaxckpt._maps.bert import BERT as BERT
from flaxckpt._maps.clip import CLIP as CLIP
from flaxckpt._maps.family import Family
from flaxckpt._maps.gemma import GEMMA as GEMMA
from flaxckpt._maps.gemma import GEMMA2 as GEMMA2
from flaxckpt._maps.gemma3 import GEMMA3 as GEMMA3
from flaxckpt._maps.gpt2 import GPT2 as GPT2
from flaxckpt._maps.llama import LLAMA as LLAMA
from flaxckpt._maps.mistral import MISTRAL as MISTRAL
from flaxckpt._maps.mistral import MIXTRAL as MIXTRAL
from flaxckpt._maps.qwen2 import QWEN2 as QWEN2
from flaxckpt._maps.qwen3 import QWEN3 as QWEN3
from flaxckpt._maps.qwen3 import QWEN3_MOE as QWEN3_MOE
from flaxckpt._maps.roberta import ROBERTA as ROBERTA
from flaxckpt._maps.t5 import T5 as T5
from flaxckpt._maps.vit import VIT as VIT
from flaxckpt._maps.whisper import WHISPER as WHISPER

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
