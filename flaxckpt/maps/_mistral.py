"""Mistral.

Sources, besides those of `_decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/mistral/modeling_mistral.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/mistral/modeling_flax_mistral.py
    https://github.com/AI-Hypercomputer/maxtext/blob/e591f30/src/maxtext/checkpoint_conversion/standalone_scripts/llama_or_mistral_ckpt.py
"""

from __future__ import annotations

from flaxckpt.maps import _decoder
from flaxckpt.maps._family import Family

_MAXTEXT = _decoder.scale_query(
    (
        *_decoder.MAXTEXT_EMBEDDING,
        *_decoder.MAXTEXT_NORMS,
        *_decoder.MAXTEXT_ATTENTION,
        *_decoder.MAXTEXT_MLP,
    )
)

MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    base="model",
    sizes=_decoder.SIZES,
    tables={
        "linen": _decoder.LINEN_UNTIED,
        "maxtext": _MAXTEXT,
        "maxtext-scanned": _decoder.scan(_MAXTEXT),
    },
    defaults={"tie_word_embeddings": False},
    ignored=_decoder.BUFFERS,
    copies=_decoder.COPIES,
    shapes=_decoder.SHAPES,
    target_bases={"linen": "model"},
)
"""Mistral."""
