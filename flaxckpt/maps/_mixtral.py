"""Mixtral.

Sources, besides those of `_decoder`:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/mixtral/modeling_mixtral.py
"""

from __future__ import annotations

from flaxckpt.maps import _decoder
from flaxckpt.maps._family import Family, Tensor

_SOURCE = "model.layers.{i}.block_sparse_moe"
_TARGET = "decoder/layers_{i}/MoeBlock_0"

_MAXTEXT = (
    *_decoder.MAXTEXT_EMBEDDING,
    *_decoder.MAXTEXT_NORMS,
    *_decoder.scale_query(_decoder.MAXTEXT_ATTENTION),
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
    sizes={**_decoder.SIZES, "x": "num_local_experts"},
    tables={"maxtext": _MAXTEXT, "maxtext-scanned": _decoder.scan(_MAXTEXT)},
    defaults={"tie_word_embeddings": False},
    ignored=_decoder.BUFFERS,
    copies=_decoder.COPIES,
    shapes=_decoder.SHAPES,
)
"""Mixtral."""
