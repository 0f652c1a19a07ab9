"""Gemma, the first version, and 2; and tables that Gemma 3 shares.

Sources, besides those of `decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/gemma/modeling_flax_gemma.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/gemma2/modeling_gemma2.py
    https://github.com/google/tunix/blob/v0.1.7/tunix/models/gemma/model.py
"""

from __future__ import annotations

from flaxckpt._maps import decoder
from flaxckpt._maps.family import Tensor

SIZES = {**decoder.SIZES, "width": "hidden_size"}
TIED = {"tie_word_embeddings": True}

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

GEMMA = decoder.DecoderFamily(
    name="gemma",
    model_types=("gemma",),
    sizes=SIZES,
    defaults=TIED,
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
    refused=decoder.LINEN_BIASES,
    target_bases={"linen": "model"},
)
"""Gemma, the first version, and 2."""

# ---- MaxText ------------------------------------------------------------------------

_FOUR = "{n:input|post_attention|pre_feedforward|post_feedforward}_layernorm"
_FOUR_TARGETS = "{n:pre_self_attention|post_self_attention|pre_ffw|post_ffw}_norm"


def embedding(factor_dtype: str) -> tuple[Tensor, ...]:
    """Returns the rows outside of layers, for the type of the root of the width."""
    table = Tensor("model.embed_tokens.weight", "token_embedder/embedding")
    return (
        table._replace(times="width", exponent=0.5, factor_dtype=factor_dtype),
        Tensor("model.norm.weight", "decoder/decoder_norm/scale", plus=1),
    )


def layers(source: str, target: str, kind: str = "") -> tuple[Tensor, ...]:
    """Returns the rows of layers; `kind` is the end of the names of their modules."""
    norms = f"{target}/{_FOUR_TARGETS}{kind}/scale"
    return (
        *decoder.maxtext_attention(source, f"{target}/self_attention{kind}"),
        *decoder.maxtext_mlp(source, f"{target}/mlp{kind}"),
        Tensor(f"{source}.{_FOUR}.weight", norms, plus=1),
    )


# Pairs of a layer with local attention and one with global attention.
_PAIRS = layers("model.layers.{(b r)}", "decoder/layers_{b}", "_{r:local|global}")

GEMMA2 = decoder.DecoderFamily(
    name="gemma2",
    model_types=("gemma2",),
    sizes={**SIZES, "b": "num_hidden_layers/2"},
    tables={
        "tunix": (
            *TUNIX,
            Tensor(
                f"{_LAYER}"
                ".{n:post_attention|pre_feedforward|post_feedforward}_layernorm.weight",
                "layers/{i}/{n:post_attn|pre_ffw|post_ffw}_norm/scale",
            ),
        ),
        **decoder.maxtext((*embedding("float32"), *decoder.scale_query(_PAIRS)), "b"),
    },
    defaults=TIED,
    refused=decoder.BIASES,
)
"""Gemma 2."""
