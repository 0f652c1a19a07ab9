"""Qwen 3, and its mixtures of experts.

Sources, besides those of `decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/qwen3/modeling_qwen3.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/qwen3_moe/modeling_qwen3_moe.py
    https://github.com/google/tunix/blob/v0.1.7/tunix/models/qwen3/model.py
    https://github.com/jax-ml/bonsai/blob/3628425/bonsai/models/qwen3/modeling.py
"""

from __future__ import annotations

from flaxckpt._maps import decoder
from flaxckpt._maps.family import Tensor

_LAYER = "model.layers.{i}"
_NORMS = f"{_LAYER}.self_attn.{{q:q_norm|k_norm}}.weight"
_MLP = "{m:gate_proj|up_proj|down_proj}"

_TUNIX_NORMS = (Tensor(_NORMS, "layers/{i}/attn/{q:q_norm|k_norm}/w"),)

_MAXTEXT = (
    *decoder.MAXTEXT_EMBEDDING,
    *decoder.MAXTEXT_NORMS,
    *decoder.MAXTEXT_ATTENTION,
    Tensor(_NORMS, "decoder/layers_{i}/self_attention/{q:query_norm|key_norm}/scale"),
)

_BONSAI = (
    Tensor("model.embed_tokens.weight", "embedder/embedding"),
    Tensor(
        f"{_LAYER}.self_attn.q_proj.weight",
        "layers/{i}/attn/q_proj/kernel",
        "(h d) e -> e h d",
    ),
    Tensor(
        f"{_LAYER}.self_attn.{{p:k_proj|v_proj}}.weight",
        "layers/{i}/attn/{p:k_proj|v_proj}/kernel",
        "(k d) e -> e k d",
    ),
    Tensor(
        f"{_LAYER}.self_attn.o_proj.weight",
        "layers/{i}/attn/o_proj/kernel",
        "e (h d) -> h d e",
    ),
    Tensor(_NORMS, "layers/{i}/attn/{q:q_norm|k_norm}/scale"),
    Tensor(
        f"{_LAYER}.{{n:input|post_attention}}_layernorm.weight",
        "layers/{i}/{n:input|post_attention}_layernorm/scale",
    ),
    Tensor(
        f"{_LAYER}.mlp.{_MLP}.weight", f"layers/{{i}}/mlp/{_MLP}/kernel", "o e -> e o"
    ),
    Tensor("model.norm.weight", "final_norm/scale"),
    Tensor("lm_head.weight", "lm_head/kernel", "v e -> e v", decoder.UNTIED),
    # Its head is a kernel of its own, although the checkpoint ties it.
    Tensor(
        "model.embed_tokens.weight", "lm_head/kernel", "v e -> e v", decoder.OWN_HEAD
    ),
)

QWEN3 = decoder.DecoderFamily(
    name="qwen3",
    model_types=("qwen3",),
    tables={
        "tunix": (*decoder.TUNIX, *_TUNIX_NORMS),
        "bonsai": _BONSAI,
        **decoder.maxtext((*_MAXTEXT, *decoder.MAXTEXT_MLP)),
    },
    refused=decoder.BIASES,
)
"""Qwen 3."""

_ROUTER = f"{_LAYER}.mlp.gate.weight"
_EXPERTS = f"{_LAYER}.mlp.experts.{{x}}.{_MLP}.weight"
_EXPERTS_OF_MAXTEXT = (
    Tensor(_ROUTER, "decoder/layers_{i}/moe_block/gate/kernel", "x e -> e x"),
    Tensor(_EXPERTS, "decoder/layers_{i}/moe_block/{m:wi_0|wi_1|wo}", "x o e -> x e o"),
)
_DENSE = "its layers without experts have no place in the programs of these layouts"

QWEN3_MOE = decoder.DecoderFamily(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    sizes={**decoder.SIZES, "x": "num_experts"},
    tables={
        "tunix": (
            *decoder.TUNIX_ATTENTION,
            *_TUNIX_NORMS,
            Tensor(_ROUTER, "layers/{i}/mlp/router/kernel", "x e -> e x"),
            Tensor(_EXPERTS, f"layers/{{i}}/mlp/{_MLP}", "x o e -> x e o"),
        ),
        **decoder.maxtext((*_MAXTEXT, *_EXPERTS_OF_MAXTEXT)),
    },
    defaults={"tie_word_embeddings": False, "decoder_sparse_step": 1},
    refused={
        **decoder.BIASES,
        "mlp_only_layers": _DENSE,
        "not decoder_sparse_step=1": _DENSE,
    },
)
"""Qwen 3 with mixtures of experts in all layers."""
