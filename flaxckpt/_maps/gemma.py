"""Gemma, the first version, and 2; and tables that Gemma 3 shares.

Sources, besides those of `decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/gemma/modeling_flax_gemma.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/gemma2/modeling_gemma2.py
    https://github.com/google/tunix/blob/v0.1.7/tunix/models/gemma/model.py
"""

from __future__ import annotations

from flaxckpt._maps import decoder
from flaxckpt._maps.family import Family, Tensor

SIZES = {**decoder.SIZES, "width": "hidden_size"}

_LAYER = "model.layers.{i}"
_MLP = "{m:gate_proj|up_proj|down_proj}"
_SAME_HEADS = "num_attention_heads==num_key_value_heads"

TUNIX = (
    Tensor("model.embed_tokens.weight", "embedder/input_embedding"),
    Tensor(
        f"{_LAYER}.self_attn.{{c:q_proj|k_proj|v_proj}}.weight",
        "layers/{i}/attn/qkv_einsum/w",
        "c (h d) e -> c h e d",
        _SAME_HEADS,
    ),
    Tensor(
        f"{_LAYER}.self_attn.q_proj.weight",
        "layers/{i}/attn/q_einsum/w",
        "(h d) e -> h e d",
        f"not {_SAME_HEADS}",
    ),
    Tensor(
        f"{_LAYER}.self_attn.{{c:k_proj|v_proj}}.weight",
        "layers/{i}/attn/kv_einsum/w",
        "c (k d) e -> c k e d",
        f"not {_SAME_HEADS}",
    ),
    Tensor(
        f"{_LAYER}.self_attn.o_proj.weight",
        "layers/{i}/attn/attn_vec_einsum/w",
        "e (h d) -> h d e",
    ),
    Tensor(
        f"{_LAYER}.mlp.{_MLP}.weight", f"layers/{{i}}/mlp/{_MLP}/kernel", "o e -> e o"
    ),
    Tensor(f"{_LAYER}.input_layernorm.weight", "layers/{i}/pre_attention_norm/scale"),
    Tensor("model.norm.weight", "final_norm/scale"),
)
"""Without the norms that versions differ in."""

GEMMA = Family(
    name="gemma",
    model_types=("gemma",),
    base="model",
    sizes=SIZES,
    tables={
        "linen": decoder.LINEN,
        "tunix": (
            *TUNIX,
            Tensor(
                f"{_LAYER}.post_attention_layernorm.weight",
                "layers/{i}/pre_ffw_norm/scale",
            ),
        ),
    },
    defaults={"tie_word_embeddings": True},
    ignored=decoder.BUFFERS,
    copies=decoder.COPIES,
    shapes=decoder.SHAPES,
    refused=decoder.LINEN_BIASES,
    target_bases={"linen": "model"},
)
"""Gemma, the first version, and 2."""
