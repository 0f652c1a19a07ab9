"""CLIP: both models, or the text model or vision model alone.

Sources:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/clip/modeling_clip.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/clip/modeling_flax_clip.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/clip/configuration_clip.py
"""

from __future__ import annotations

from flaxckpt._maps.family import Family, Tensor
from flaxckpt._maps.modules import array, embedding, linear, norm, under


def _encoder(layer: str) -> tuple[Tensor, ...]:
    return (
        *linear(f"{layer}.self_attn.{{p:q_proj|k_proj|v_proj|out_proj}}"),
        *linear(f"{layer}.mlp.{{m:fc1|fc2}}"),
        *norm(f"{layer}.{{n:layer_norm1|layer_norm2}}"),
    )


_IS_ALONE = "not model_type=clip"
_HAS_NO_PROJECTION = f"{_IS_ALONE} and not architectures=*WithProjection*"
_VISION = "vision_model.embeddings"

_TEXT_MODEL = (
    *embedding("text_model.embeddings.{w:token|position}_embedding"),
    *_encoder("text_model.encoder.layers.{i}"),
    *norm("text_model.final_layer_norm"),
    *linear("text_projection", bias=False, optional=_HAS_NO_PROJECTION),
)
_VISION_MODEL = (
    *array(f"{_VISION}.class_embedding"),
    Tensor(
        f"{_VISION}.patch_embedding.weight",
        "vision_model/embeddings/patch_embedding/kernel",
        "o e y x -> y x e o",
    ),
    *embedding(f"{_VISION}.position_embedding"),
    *_encoder("vision_model.encoder.layers.{j}"),
    *norm("vision_model.{n:pre_layrnorm|post_layernorm}"),
    *linear("visual_projection", bias=False, optional=_HAS_NO_PROJECTION),
)


def _shapes(model: str) -> dict[str, str]:
    layer = f"{model}_model.encoder.layers.{{i}}"
    attention = f"{layer}.self_attn.{{p:q_proj|k_proj|v_proj|out_proj}}"
    width, inner = (
        f"{model}_config.{key}|{key}" for key in ("hidden_size", "intermediate_size")
    )
    return {
        f"{attention}.weight": f"{width} {width}",
        f"{layer}.mlp.fc1.weight": f"{inner} {width}",
        f"{layer}.mlp.fc2.weight": f"{width} {inner}",
    }


CLIP = Family(
    name="clip",
    model_types=("clip", "clip_text_model", "clip_vision_model"),
    base="",
    sizes={  # configurations of both models leave out numbers that are the default
        "i": "text_config.num_hidden_layers|num_hidden_layers|12",
        "j": "vision_config.num_hidden_layers|num_hidden_layers|12",
    },
    tables={
        "linen": (
            *under("not model_type=clip_vision_model", _TEXT_MODEL),
            *under("not model_type=clip_text_model", _VISION_MODEL),
            *array("logit_scale", optional=_IS_ALONE),
        )
    },
    ignored=r"(text|vision)_model/embeddings/position_ids",
    shapes={
        **_shapes("text"),
        **_shapes("vision"),
        "text_model.embeddings.token_embedding.weight": (
            "text_config.vocab_size|vocab_size text_config.hidden_size|hidden_size"
        ),
    },
)
"""CLIP: both models, or the text model or vision model alone."""
