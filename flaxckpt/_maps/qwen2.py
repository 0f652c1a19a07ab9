"""Qwen 2 and 2.5.

Sources, besides those of `decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/qwen2/modeling_qwen2.py
    https://github.com/google/tunix/blob/v0.1.7/tunix/models/qwen2/model.py
"""

from __future__ import annotations

from flaxckpt._maps import decoder
from flaxckpt._maps.family import Tensor

_ATTENTION = "model.layers.{i}.self_attn"

_MAXTEXT = (
    *decoder.MAXTEXT_EMBEDDING,
    *decoder.MAXTEXT_NORMS,
    *decoder.MAXTEXT_ATTENTION,
    *decoder.MAXTEXT_MLP,
    Tensor(
        f"{_ATTENTION}.q_proj.bias",
        "decoder/layers_{i}/self_attention/query/bias",
        "(h d) -> h d",
    ),
    Tensor(
        f"{_ATTENTION}.{{p:k_proj|v_proj}}.bias",
        "decoder/layers_{i}/self_attention/{p:key|value}/bias",
        "(k d) -> k d",
    ),
)

QWEN2 = decoder.DecoderFamily(
    name="qwen2",
    model_types=("qwen2",),
    tables={
        "tunix": (
            *decoder.TUNIX,
            Tensor(
                f"{_ATTENTION}.{{b:q_proj|k_proj|v_proj}}.bias",
                "layers/{i}/attn/{b:q_bias|k_bias|v_bias}",
            ),
        ),
        **decoder.maxtext(_MAXTEXT),
    },
)
"""Qwen 2 and 2.5."""
