"""All families."""

from __future__ import annotations

from flaxckpt.maps._bert import BERT
from flaxckpt.maps._clip import CLIP
from flaxckpt.maps._family import Family
from flaxckpt.maps._gpt2 import GPT2
from flaxckpt.maps._llama import LLAMA
from flaxckpt.maps._roberta import ROBERTA
from flaxckpt.maps._t5 import T5
from flaxckpt.maps._vit import VIT
from flaxckpt.maps._whisper import WHISPER

FAMILIES: tuple[Family, ...] = (
    BERT,
    CLIP,
    GPT2,
    LLAMA,
    ROBERTA,
    T5,
    VIT,
    WHISPER,
)
