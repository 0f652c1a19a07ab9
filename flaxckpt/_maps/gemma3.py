"""Gemma 3, its language model.

Sources, besides those of `gemma` and `decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/gemma3/modeling_gemma3.py
    https://github.com/google/tunix/blob/v0.1.7/tunix/models/gemma3/model.py
    https://github.com/jax-ml/bonsai/blob/3628425/bonsai/models/gemma3/modeling.py
"""

from __future__ import annotations

from flaxckpt._maps import decoder, gemma
from flaxckpt._maps.family import Tensor
from flaxckpt._maps.modules import linear

_LAYER = "model.layers.{i}"
_BONSAI_LAYER = "language_model/layers/{i}"
_NORMS = "{n:input|post_attention|pre_feedforward|post_feedforward}_layernorm"
_KERNELS = (
    "self_attn.{p:q_proj|k_proj|v_proj|o_proj}",
    "mlp.{m:gate_proj|up_proj|down_proj}",
)
_SCALES = ("self_attn.{q:q_norm|k_norm}", _NORMS)


def _maxtext(source: str, target: str) -> tuple[Tensor, ...]:
    norms = f"{target}/self_attention/{{q:query_norm|key_norm}}/scale"
    return (
        *gemma.layers(source, target),
        Tensor(f"{source}.self_attn.{{q:q_norm|k_norm}}.weight", norms, plus=1),
    )


_EMBEDDING = gemma.embedding("bfloat16")

# Blocks of six layers are scanned, and the rest of the layers is not.
_BLOCKS = _maxtext("model.layers.{(b r)}", "decoder/layers_{b}/layers_{r}")
_REST = _maxtext("model.layers.{s+first}", "decoder/layers_remainder/layers_{s}")

_BONSAI = (
    Tensor("model.embed_tokens.weight", "embed_tokens/weight/embedding"),
    Tensor("model.norm.weight", "language_model/norm/scale"),
    *(
        row
        for name in _KERNELS
        for row in linear(
            f"{_LAYER}.{name}", f"{_BONSAI_LAYER}/{name.replace('.', '/')}", bias=False
        )
    ),
    *(
        Tensor(
            f"{_LAYER}.{name}.weight", f"{_BONSAI_LAYER}/{name.replace('.', '/')}/scale"
        )
        for name in _SCALES
    ),
)

GEMMA3 = decoder.DecoderFamily(
    name="gemma3",
    model_types=("gemma3_text",),
    sizes={
        **gemma.SIZES,
        "b": "num_hidden_layers//6",
        "r": 6,
        "s": "num_hidden_layers%6",
        "first": "num_hidden_layers//6*6",
    },
    tables={
        "tunix": (
            *gemma.TUNIX,
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
        "maxtext": (*_EMBEDDING, *_maxtext(_LAYER, "decoder/layers_{i}")),
        "maxtext-scanned": (*_EMBEDDING, *decoder.scan(_BLOCKS, "b"), *_REST),
    },
    defaults=gemma.TIED,
    refused=decoder.BIASES,
)
"""Gemma 3, its language model."""
