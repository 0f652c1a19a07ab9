"""ViT.

Sources:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/vit/modeling_vit.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/vit/modeling_flax_vit.py
    https://github.com/jax-ml/bonsai/blob/3628425/bonsai/models/vit/modeling.py
"""

from __future__ import annotations

from flaxckpt._maps.family import Family
from flaxckpt._maps.modules import array, conv, from_heads, head, linear, norm, to_heads

_LAYER = "vit.encoder.layer.{i}"
_QKV = "{p:query|key|value}"

_LINEN = (
    *array("vit.embeddings.{e:cls_token|position_embeddings}"),
    *conv("vit.embeddings.patch_embeddings.projection"),
    *linear(f"{_LAYER}.attention.attention.{_QKV}", bias="qkv_bias"),
    *linear(f"{_LAYER}.{{t:attention.output|intermediate|output}}.dense"),
    *norm(f"{_LAYER}.layernorm_{{n:before|after}}"),
    *norm("vit.layernorm"),
    *linear("vit.pooler.dense", optional=True),
    *head(linear("classifier"), "ForImageClassification"),
)

_BONSAI = (
    *array(
        "vit.embeddings.{e:cls_token|position_embeddings}",
        "pos_embeddings/{e:cls_token|pos_embeddings}",
    ),
    *conv("vit.embeddings.patch_embeddings.projection", "pos_embeddings/projection"),
    *to_heads(
        f"{_LAYER}.attention.attention.{_QKV}",
        f"layers/{{i}}/attention/{_QKV}",
        bias="qkv_bias",
    ),
    *from_heads(f"{_LAYER}.attention.output.dense", "layers/{i}/attention/out"),
    *linear(
        f"{_LAYER}.{{t:intermediate|output}}.dense", "layers/{i}/{t:linear1|linear2}"
    ),
    *norm(
        f"{_LAYER}.layernorm_{{n:before|after}}",
        "layers/{i}/layernorm_{n:before|after}",
    ),
    *norm("vit.layernorm", "ln"),
    *head(linear("classifier"), "ForImageClassification"),
)

VIT = Family(
    name="vit",
    model_types=("vit",),
    base="vit",
    sizes={
        "i": "num_hidden_layers",
        "h": "num_attention_heads",
        "d": "hidden_size/num_attention_heads",
    },
    tables={"linen": _LINEN, "bonsai": _BONSAI},
    defaults={"qkv_bias": True},
    # Bonsai's model has no pooler.
    ignored=r"(vit/)?(embeddings/mask_token|pooler/dense/(weight|bias))",
    target_bases={"linen": "vit"},
    shapes={
        "vit.embeddings.patch_embeddings.projection.weight": (
            "hidden_size num_channels patch_size patch_size"
        ),
        f"{_LAYER}.attention.attention.{_QKV}.weight": "hidden_size hidden_size",
        f"{_LAYER}.attention.output.dense.weight": "hidden_size hidden_size",
        f"{_LAYER}.intermediate.dense.weight": "intermediate_size hidden_size",
        f"{_LAYER}.output.dense.weight": "hidden_size intermediate_size",
    },
)
"""ViT."""
