"""Whisper; and its encoder with a classifier.

Sources:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/whisper/modeling_whisper.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/whisper/modeling_flax_whisper.py
    https://github.com/jax-ml/bonsai/blob/3628425/bonsai/models/whisper/modeling.py
"""

from __future__ import annotations

from flaxckpt._maps.family import Family, Tensor
from flaxckpt._maps.modules import (
    array,
    conv1d,
    embedding,
    from_heads,
    head,
    linear,
    norm,
    to_heads,
    under,
)

_HAS_DECODER = "not architectures=*AudioClassification*"


def _layers(layer: str) -> tuple[Tensor, ...]:
    return (
        *linear(f"{layer}.{{m:fc1|fc2}}"),
        *norm(f"{layer}.{{n:self_attn|final}}_layer_norm"),
    )


def _attention(name: str) -> tuple[Tensor, ...]:
    return (
        *linear(f"{name}.{{p:q|v|out}}_proj"),
        *linear(f"{name}.k_proj", bias=False),
    )


def _heads(name: str) -> tuple[Tensor, ...]:
    target = name.replace(".", "/")
    return (
        *to_heads(f"{name}.{{p:q|v}}_proj", f"{target}/{{p:query|value}}"),
        *to_heads(f"{name}.k_proj", f"{target}/key", bias=False),
        *from_heads(f"{name}.out_proj", f"{target}/out"),
    )


_ENCODER = (
    *conv1d("model.encoder.{c:conv1|conv2}"),
    *embedding("model.encoder.embed_positions"),
    *_layers("model.encoder.layers.{i}"),
    *norm("model.encoder.layer_norm"),
)
_DECODER = (
    *embedding("model.decoder.{w:embed_tokens|embed_positions}"),
    *_layers("model.decoder.layers.{j}"),
    *norm("model.decoder.layers.{j}.encoder_attn_layer_norm"),
    *norm("model.decoder.layer_norm"),
)
_ATTENTIONS = "model.decoder.layers.{j}.{a:self_attn|encoder_attn}"

WHISPER = Family(
    name="whisper",
    model_types=("whisper",),
    base="model",
    sizes={
        "i": "encoder_layers",
        "j": "decoder_layers",
        "h": "encoder_attention_heads",
        "d": "d_model/encoder_attention_heads",
    },
    tables={
        "linen": (
            *_ENCODER,
            *_attention("model.encoder.layers.{i}.self_attn"),
            *under(_HAS_DECODER, (*_DECODER, *_attention(_ATTENTIONS))),
            *under(
                _HAS_DECODER,
                head(
                    linear(
                        "proj_out",
                        "lm_head",
                        when="not tie_word_embeddings",
                        bias=False,
                    )
                ),
            ),
            *array("layer_weights", optional="not use_weighted_layer_sum"),
            *head(linear("{c:projector|classifier}"), "AudioClassification"),
        ),
        # Bonsai's model has as many heads in its decoder as in its encoder.
        "bonsai": tuple(
            tensor._replace(target=tensor.target.removeprefix("model/"))
            for tensor in (
                *_ENCODER,
                *_heads("model.encoder.layers.{i}.self_attn"),
                *_DECODER,
                *_heads(_ATTENTIONS),
            )
        ),
    },
    defaults={"tie_word_embeddings": True},
    copies={"proj_out.weight": "model.decoder.embed_tokens.weight"},
    target_bases={"linen": "model"},
    # A bias of keys adds the same number to all scores of a query: softmax drops it.
    unpublished={"bonsai": r"(.*/)?(encoder|decoder)/layers/\d+/\w+/key/bias"},
    shapes={
        "model.encoder.conv1.weight": "d_model num_mel_bins 3",
        "model.encoder.embed_positions.weight": "max_source_positions d_model",
        "model.decoder.embed_positions.weight": "max_target_positions d_model",
        "model.decoder.embed_tokens.weight": "vocab_size d_model",
        "model.{s:encoder|decoder}.layers.{i}.{a:self_attn|encoder_attn}"
        ".{p:q_proj|k_proj|v_proj|out_proj}.weight": "d_model d_model",
        "model.encoder.layers.{i}.fc1.weight": "encoder_ffn_dim d_model",
        "model.encoder.layers.{i}.fc2.weight": "d_model encoder_ffn_dim",
        "model.decoder.layers.{i}.fc1.weight": "decoder_ffn_dim d_model",
        "model.decoder.layers.{i}.fc2.weight": "d_model decoder_ffn_dim",
        "proj_out.weight": "vocab_size d_model",
    },
)
"""Whisper."""
