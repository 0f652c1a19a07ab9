"""Gemma 3, its language model.

Sources, besides those of `_gemma` and `_decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/gemma3/modeling_gemma3.py
    https://github.com/google/tunix/blob/v0.1.7/tunix/models/gemma3/model.py
    https://github.com/jax-ml/bonsai/blob/3628425/bonsai/models/gemma3/modeling.py
"""

from __future__ import annotations

from flaxckpt.maps import _decoder, _gemma
from flaxckpt.maps._family import Family, Tensor

_NORMS = "{n:input|post_attention|pre_feedforward|post_feedforward}_layernorm"


def _layers(source: str, target: str) -> tuple[Tensor, ...]:
    """Returns the rows of layers of MaxText."""
    attention = f"{target}/self_attention"
    return (
        Tensor(
            f"{source}.self_attn.q_proj.weight",
            f"{attention}/query/kernel",
            "(h d) e -> e h d",
        ),
        Tensor(
            f"{source}.self_attn.{{p:k_proj|v_proj}}.weight",
            f"{attention}/{{p:key|value}}/kernel",
            "(k d) e -> e k d",
        ),
        Tensor(
            f"{source}.self_attn.o_proj.weight",
            f"{attention}/out/kernel",
            "e (h d) -> h d e",
        ),
        Tensor(
            f"{source}.self_attn.{{q:q_norm|k_norm}}.weight",
            f"{attention}/{{q:query_norm|key_norm}}/scale",
            plus=1,
        ),
        Tensor(
            f"{source}.mlp.{{m:gate_proj|up_proj|down_proj}}.weight",
            f"{target}/mlp/{{m:wi_0|wi_1|wo}}/kernel",
            "o e -> e o",
        ),
        Tensor(
            f"{source}.{_NORMS}.weight",
            f"{target}/{{n:pre_self_attention|post_self_attention|pre_ffw|post_ffw}}"
            "_norm/scale",
            plus=1,
        ),
    )


_EMBEDDING = (
    Tensor(
        "model.embed_tokens.weight",
        "token_embedder/embedding",
        times="width",
        exponent=0.5,
        factor_dtype="bfloat16",
    ),
    Tensor("model.norm.weight", "decoder/decoder_norm/scale", plus=1),
)

# Blocks of six layers are scanned, and the rest of the layers is not.
_SCANNED = (
    *_EMBEDDING,
    *_decoder.scan(
        _layers("model.layers.{(b r)}", "decoder/layers_{b}/layers_{r}"), "b"
    ),
    *_layers("model.layers.{s+first}", "decoder/layers_remainder/layers_{s}"),
)

_BONSAI = (
    Tensor("model.embed_tokens.weight", "embed_tokens/weight/embedding"),
    Tensor("model.norm.weight", "language_model/norm/scale"),
    Tensor(
        "model.layers.{i}.self_attn.{p:q_proj|k_proj|v_proj|o_proj}.weight",
        "language_model/layers/{i}/self_attn/{p:q_proj|k_proj|v_proj|o_proj}/kernel",
        "o e -> e o",
    ),
    Tensor(
        "model.layers.{i}.mlp.{m:gate_proj|up_proj|down_proj}.weight",
        "language_model/layers/{i}/mlp/{m:gate_proj|up_proj|down_proj}/kernel",
        "o e -> e o",
    ),
    Tensor(
        "model.layers.{i}.self_attn.{q:q_norm|k_norm}.weight",
        "language_model/layers/{i}/self_attn/{q:q_norm|k_norm}/scale",
    ),
    Tensor(
        f"model.layers.{{i}}.{_NORMS}.weight",
        f"language_model/layers/{{i}}/{_NORMS}/scale",
    ),
)

GEMMA3 = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    base="model",
    sizes={
        **_gemma.SIZES,
        "b": "num_hidden_layers//6",
        "r": 6,
        "s": "num_hidden_layers%6",
        "first": "num_hidden_layers//6*6",
    },
    tables={
        "tunix": (
            *_gemma.TUNIX,
            Tensor(
                "model.layers.{i}"
                ".{n:post_attention|pre_feedforward|post_feedforward}_layernorm.weight",
                "layers/{i}/{n:post_attention|pre_ffw|post_ffw}_norm/scale",
            ),
            Tensor(
                "model.layers.{i}.self_attn.{q:q_norm|k_norm}.weight",
                "layers/{i}/attn/{q:_query_norm|_key_norm}/scale",
            ),
        ),
        "bonsai": _BONSAI,
        "maxtext": (
            *_EMBEDDING,
            *_layers("model.layers.{i}", "decoder/layers_{i}"),
        ),
        "maxtext-scanned": _SCANNED,
    },
    defaults={"tie_word_embeddings": True},
    ignored=_decoder.BUFFERS,
    shapes=_decoder.SHAPES,
)
"""Gemma 3, its language model."""
