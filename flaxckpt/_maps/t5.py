"""T5: the first version, 1.1, Flan-T5; and encoders alone.

Sources:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/t5/modeling_t5.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/t5/modeling_flax_t5.py
"""

from __future__ import annotations

from flaxckpt._maps.family import Family, Tensor
from flaxckpt._maps.modules import array, embedding, linear, under

_HAS_DECODER = "not architectures=*EncoderModel*"
_IS_GATED = "feed_forward_proj=gated-*"


def _attention(layer: str, name: str) -> tuple[Tensor, ...]:
    return (
        *linear(f"{layer}.{name}.{{p:q|k|v|o}}", bias=False),
        *array(f"{layer}.layer_norm.weight"),
    )


def _feed_forward(layer: str) -> tuple[Tensor, ...]:
    dense = f"{layer}.DenseReluDense"
    return (
        *linear(f"{dense}.{{m:wi|wo}}", when=f"not {_IS_GATED}", bias=False),
        *linear(f"{dense}.{{g:wi_0|wi_1|wo}}", when=_IS_GATED, bias=False),
        *array(f"{layer}.layer_norm.weight"),
    )


_BLOCK = "{s:encoder|decoder}.block.{i}.layer.{l}"
_ATTENTION = "{a:SelfAttention|EncDecAttention}"
_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"

_ENCODER = (
    *embedding("shared"),
    *_attention("encoder.block.{i}.layer.0", "SelfAttention"),
    *_feed_forward("encoder.block.{i}.layer.1"),
    *embedding(f"encoder.{_BIAS}"),
    *array("encoder.final_layer_norm.weight"),
)
_DECODER = (
    *_attention("decoder.block.{j}.layer.0", "SelfAttention"),
    *_attention("decoder.block.{j}.layer.1", "EncDecAttention"),
    *_feed_forward("decoder.block.{j}.layer.2"),
    *embedding(f"decoder.{_BIAS}"),
    *array("decoder.final_layer_norm.weight"),
    *linear(
        "lm_head",
        when="not tie_word_embeddings",
        bias=False,
        optional="architectures=*T5Model*",
    ),
)

T5 = Family(
    name="t5",
    model_types=("t5",),
    base="",
    sizes={"i": "num_layers", "j": "num_decoder_layers|num_layers"},
    tables={"linen": (*_ENCODER, *under(_HAS_DECODER, _DECODER))},
    defaults={"tie_word_embeddings": True, "feed_forward_proj": "relu"},
    # A bias of old checkpoints that is never used.
    ignored="decoder/block/0/layer/1/EncDecAttention/relative_attention_bias/weight",
    copies={
        f"{name}.weight": "shared.weight"
        for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    },
    shapes={
        "shared.weight": "vocab_size d_model",
        f"{_BLOCK}.{_ATTENTION}.{{p:q|k|v}}.weight": "num_heads*d_kv d_model",
        f"{_BLOCK}.{_ATTENTION}.o.weight": "d_model num_heads*d_kv",
        f"{_BLOCK}.DenseReluDense.{{m:wi|wi_0|wi_1}}.weight": "d_ff d_model",
        f"{_BLOCK}.DenseReluDense.wo.weight": "d_model d_ff",
        f"{{s:encoder|decoder}}.{_BIAS}.weight": (
            "relative_attention_num_buckets num_heads"
        ),
        "lm_head.weight": "vocab_size d_model",
    },
)
"""T5: the first version, 1.1, Flan-T5."""
