"""Mistral.

Sources, besides those of `decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/mistral/modeling_mistral.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/mistral/modeling_flax_mistral.py
    https://github.com/AI-Hypercomputer/maxtext/blob/e591f30/src/maxtext/checkpoint_conversion/standalone_scripts/llama_or_mistral_ckpt.py
"""

from __future__ import annotations

from flaxckpt._maps import decoder
from flaxckpt._maps.family import Family

_MAXTEXT = decoder.scale_query(
    (
        *decoder.MAXTEXT_EMBEDDING,
        *decoder.MAXTEXT_NORMS,
        *decoder.MAXTEXT_ATTENTION,
        *decoder.MAXTEXT_MLP,
    )
)

MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    base="model",
    sizes=decoder.SIZES,
    tables={
        "linen": decoder.LINEN_UNTIED,
        "maxtext": _MAXTEXT,
        "maxtext-scanned": decoder.scan(_MAXTEXT),
    },
    defaults={"tie_word_embeddings": False},
    ignored=decoder.BUFFERS,
    copies=decoder.COPIES,
    shapes=decoder.SHAPES,
    target_bases={"linen": "model"},
)
"""Mistral."""
