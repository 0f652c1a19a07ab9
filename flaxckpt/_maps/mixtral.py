"""Mixtral.

Sources, besides those of `decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/mixtral/modeling_mixtral.py
"""

from __future__ import annotations

from flaxckpt._maps import decoder
from flaxckpt._maps.family import Family, Tensor

_SOURCE = "model.layers.{i}.block_sparse_moe"
_TARGET = "decoder/layers_{i}/MoeBlock_0"

_MAXTEXT = (
    *decoder.MAXTEXT_EMBEDDING,
    *decoder.MAXTEXT_NORMS,
    *decoder.scale_query(decoder.MAXTEXT_ATTENTION),
    Tensor(f"{_SOURCE}.gate.weight", f"{_TARGET}/gate/kernel", "x e -> e x"),
    Tensor(
        f"{_SOURCE}.experts.{{x}}.{{m:w1|w3|w2}}.weight",
        f"{_TARGET}/{{m:wi_0|wi_1|wo}}",
        "x o e -> x e o",
    ),
)

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    base="model",
    sizes={**decoder.SIZES, "x": "num_local_experts"},
    tables={"maxtext": _MAXTEXT, "maxtext-scanned": decoder.scan(_MAXTEXT)},
    defaults={"tie_word_embeddings": False},
    ignored=decoder.BUFFERS,
    copies=decoder.COPIES,
    shapes=decoder.SHAPES,
)
"""Mixtral."""
