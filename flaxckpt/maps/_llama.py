"""Llama 2 and 3."""

from __future__ import annotations

from flaxckpt.maps import _decoder
from flaxckpt.maps._family import Family

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    base="model",
    sizes=_decoder.SIZES,
    tables={
        "linen": _decoder.LINEN,
        "tunix": _decoder.TUNIX,
        "maxtext": _decoder.MAXTEXT,
        "maxtext-scanned": _decoder.scan(_decoder.MAXTEXT),
    },
    defaults={"tie_word_embeddings": False},
    ignored=_decoder.BUFFERS,
    target_bases={"linen": "model"},
)
"""Llama 2 and 3."""
