"""Gemma 2; the sources are those of `_gemma` and `_decoder`."""

from __future__ import annotations

from flaxckpt.maps import _decoder, _gemma
from flaxckpt.maps._family import Family, Tensor

_NORMS = "{n:input|post_attention|pre_feedforward|post_feedforward}_layernorm.weight"

# MaxText has pairs of a layer with local attention and one with global attention.
_SOURCE = "model.layers.{(b r)}"
_TARGET = "decoder/layers_{b}"
_KIND = "{r:local|global}"

_MAXTEXT = (
    Tensor(
        "model.embed_tokens.weight",
        "token_embedder/embedding",
        times="width",
        exponent=0.5,
        factor_dtype="float32",
    ),
    Tensor("model.norm.weight", "decoder/decoder_norm/scale", plus=1),
    Tensor(
        f"{_SOURCE}.self_attn.q_proj.weight",
        f"{_TARGET}/self_attention_{_KIND}/query/kernel",
        "(h d) e -> e h d",
        times="d",
        exponent=-0.5,
    ),
    Tensor(
        f"{_SOURCE}.self_attn.{{p:k_proj|v_proj}}.weight",
        f"{_TARGET}/self_attention_{_KIND}/{{p:key|value}}/kernel",
        "(k d) e -> e k d",
    ),
    Tensor(
        f"{_SOURCE}.self_attn.o_proj.weight",
        f"{_TARGET}/self_attention_{_KIND}/out/kernel",
        "e (h d) -> h d e",
    ),
    Tensor(
        f"{_SOURCE}.mlp.{{m:gate_proj|up_proj|down_proj}}.weight",
        f"{_TARGET}/mlp_{_KIND}/{{m:wi_0|wi_1|wo}}/kernel",
        "o e -> e o",
    ),
    Tensor(
        f"{_SOURCE}.{_NORMS}",
        f"{_TARGET}/{{n:pre_self_attention|post_self_attention|pre_ffw|post_ffw}}"
        f"_norm_{_KIND}/scale",
        plus=1,
    ),
)

GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    base="model",
    sizes={**_gemma.SIZES, "b": "num_hidden_layers/2"},
    tables={
        "tunix": (
            *_gemma.TUNIX,
            Tensor(
                "model.layers.{i}"
                ".{n:post_attention|pre_feedforward|post_feedforward}_layernorm.weight",
                "layers/{i}/{n:post_attn|pre_ffw|post_ffw}_norm/scale",
            ),
        ),
        "maxtext": _MAXTEXT,
        "maxtext-scanned": _decoder.scan(_MAXTEXT, "b"),
    },
    defaults={"tie_word_embeddings": True},
    ignored=_decoder.BUFFERS,
    shapes=_decoder.SHAPES,
)
"""Gemma 2."""
