"""Maps: transforms between published models and the layouts of Flax programs.

A map is a list of transforms from a checkpoint of Hugging Face to the state of a
program. Each family of models is a table of its tensors, with a column for each target
layout: `linen` (the Flax classes of transformers 4), `tunix`, `bonsai`, `maxtext` and
`maxtext-scanned`. `flaxckpt.transforms.inverse` returns the map back.
"""

from __future__ import annotations

from flaxckpt.maps._bert import BERT as bert  # noqa: N811
from flaxckpt.maps._clip import CLIP as clip  # noqa: N811
from flaxckpt.maps._detect import Detected, detect, find
from flaxckpt.maps._family import Family, Tensor
from flaxckpt.maps._gemma import GEMMA as gemma  # noqa: N811
from flaxckpt.maps._gemma2 import GEMMA2 as gemma2  # noqa: N811
from flaxckpt.maps._gemma3 import GEMMA3 as gemma3  # noqa: N811
from flaxckpt.maps._gpt2 import GPT2 as gpt2  # noqa: N811
from flaxckpt.maps._llama import LLAMA as llama  # noqa: N811
from flaxckpt.maps._mistral import MISTRAL as mistral  # noqa: N811
from flaxckpt.maps._mixtral import MIXTRAL as mixtral  # noqa: N811
from flaxckpt.maps._qwen2 import QWEN2 as qwen2  # noqa: N811
from flaxckpt.maps._qwen3 import QWEN3 as qwen3  # noqa: N811
from flaxckpt.maps._qwen3_moe import QWEN3_MOE as qwen3_moe  # noqa: N811
from flaxckpt.maps._roberta import ROBERTA as roberta  # noqa: N811
from flaxckpt.maps._t5 import T5 as t5  # noqa: N811
from flaxckpt.maps._vit import VIT as vit  # noqa: N811
from flaxckpt.maps._whisper import WHISPER as whisper  # noqa: N811

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
