"""Gemma 2; the sources are those of `gemma` and `decoder`."""

from __future__ import annotations

from flaxckpt._maps import decoder, gemma, gemma_maxtext
from flaxckpt._maps.family import Family, Tensor

# MaxText has pairs of a layer with local attention and one with global attention.
_MAXTEXT = (
    *gemma_maxtext.embedding("float32"),
    *decoder.scale_query(
        gemma_maxtext.layers(
            "model.layers.{(b r)}", "decoder/layers_{b}", "_{r:local|global}"
        )
    ),
)

GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    base="model",
    sizes={**gemma.SIZES, "b": "num_hidden_layers/2"},
    tables={
        "tunix": (
            *gemma.TUNIX,
            Tensor(
                "model.layers.{i}"
                ".{n:post_attention|pre_feedforward|post_feedforward}_layernorm.weight",
                "layers/{i}/{n:post_attn|pre_ffw|post_ffw}_norm/scale",
            ),
        ),
        "maxtext": _MAXTEXT,
        "maxtext-scanned": decoder.scan(_MAXTEXT, "b"),
    },
    defaults={"tie_word_embeddings": True},
    ignored=decoder.BUFFERS,
    copies=decoder.COPIES,
    shapes=decoder.SHAPES,
    refused=decoder.BIASES,
)
"""Gemma 2."""
