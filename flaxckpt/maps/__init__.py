"""Maps: transforms between published models and the layouts of Flax programs.

A map is a list of transforms from a checkpoint of Hugging Face to the state of a
program. Each family of models is a table of its tensors, with a column for each target
layout: `linen` (the Flax classes of transformers 4), `tunix`, `bonsai`, `maxtext` and
`maxtext-scanned`. `flaxckpt.transforms.inverse` returns the map back.
"""

from __future__ import annotations

from flaxckpt.maps._detect import Detected, detect, find
from flaxckpt.maps._family import Family, Tensor
from flaxckpt.maps._llama import LLAMA as llama  # noqa: N811

__all__ = ["Detected", "Family", "Tensor", "detect", "find", "llama"]
