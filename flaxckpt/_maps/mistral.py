"""Mistral and Mixtral.

Sources, besides those of `decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/mistral/modeling_mistral.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/mistral/modeling_flax_mistral.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/mixtral/modeling_mixtral.py
    https://github.com/AI-Hypercomputer/maxtext/blob/e591f30/src/maxtext/checkpoint_conversion/standalone_scripts/llama_or_mistral_ckpt.py
"""

from __future__ import annotations

from flaxckpt._maps import decoder
from flaxckpt._maps.family import Tensor

_ATTENTION = (
    *decoder.MAXTEXT_EMBEDDING,
    *decoder.MAXTEXT_NORMS,
    *decoder.scale_query(decoder.MAXTEXT_ATTENTION),
)

_SOURCE = "model.layers.{i}.block_sparse_moe"
_TARGET = "decoder/layers_{i}/MoeBlock_0"

MISTRAL = decoder.DecoderFamily(
    name="mistral",
    model_types=("mistral",),
    tables={
        "linen": decoder.LINEN_UNTIED,
        **decoder.maxtext((*_ATTENTION, *decoder.MAXTEXT_MLP)),
    },
    target_bases={"linen": "model"},
)
"""Mistral."""

_EXPERTS = (
    Tensor(f"{_SOURCE}.gate.weight", f"{_TARGET}/gate/kernel", "x e -> e x"),
    Tensor(
        f"{_SOURCE}.experts.{{x}}.{{m:w1|w3|w2}}.weight",
        f"{_TARGET}/{{m:wi_0|wi_1|wo}}",
        "x o e -> x e o",
    ),
)

MIXTRAL = decoder.DecoderFamily(
    name="mixtral",
    model_types=("mixtral",),
    sizes={**decoder.SIZES, "x": "num_local_experts"},
    tables=decoder.maxtext((*_ATTENTION, *_EXPERTS)),
)
"""Mixtral."""
