"""Maps: transforms between published models and the layouts of Flax programs.

A map is a list of transforms from a checkpoint of Hugging Face to the state of a
program. Each family of models is a table of its tensors, with a column for each target
layout: `linen` (the Flax classes of transformers 4), `tunix`, `bonsai`, `maxtext` and
`maxtext-scanned`. `flaxckpt.transforms.inverse` returns the map back.
"""

from __future__ import annotations

from flaxckpt._maps.detect import Detected, detect, find
from flaxckpt._maps.families import BERT as bert  # noqa: N811
from flaxckpt._maps.families import CLIP as clip  # noqa: N811
from flaxckpt._maps.families import GEMMA as gemma  # noqa: N811
from flaxckpt._maps.families import GEMMA2 as gemma2  # noqa: N811
from flaxckpt._maps.families import GEMMA3 as gemma3  # noqa: N811
from flaxckpt._maps.families import GPT2 as gpt2  # noqa: N811
from flaxckpt._maps.families import LLAMA as llama  # noqa: N811
from flaxckpt._maps.families import MISTRAL as mistral  # noqa: N811
from flaxckpt._maps.families import MIXTRAL as mixtral  # noqa: N811
from flaxckpt._maps.families import QWEN2 as qwen2  # noqa: N811
from flaxckpt._maps.families import QWEN3 as qwen3  # noqa: N811
from flaxckpt._maps.families import QWEN3_MOE as qwen3_moe  # noqa: N811
from flaxckpt._maps.families import ROBERTA as roberta  # noqa: N811
from flaxckpt._maps.families import T5 as t5  # noqa: N811
from flaxckpt._maps.families import VIT as vit  # noqa: N811
from flaxckpt._maps.families import WHISPER as whisper  # noqa: N811
from flaxckpt._maps.family import Family, Tensor

__all__ = [
    "Detected",
    "Family",
    "Tensor",
    "bert",
    "clip",
    "detect",
    "find",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "t5",
    "vit",
    "whisper",
]
