"""Llama 2 and 3; the sources are those of `decoder`."""

from __future__ import annotations

from flaxckpt._maps import decoder
from flaxckpt._maps.family import Tensor

_SCALED = "rope_scaling.rope_type=llama3"
"""Llama 3.1 and later: MaxText interleaves the halves of its rotary embeddings."""

_ATTENTION = "model.layers.{i}.self_attn"

_MAXTEXT = (
    *decoder.MAXTEXT_EMBEDDING,
    *decoder.MAXTEXT_NORMS,
    *(t._replace(when=f"not {_SCALED}") for t in decoder.MAXTEXT_QUERY_KEY),
    Tensor(
        f"{_ATTENTION}.q_proj.weight",
        "decoder/layers_{i}/self_attention/query/kernel",
        "(h two p) e -> e h (p two)",
        when=_SCALED,
    ),
    Tensor(
        f"{_ATTENTION}.k_proj.weight",
        "decoder/layers_{i}/self_attention/key/kernel",
        "(k two p) e -> e k (p two)",
        when=_SCALED,
    ),
    *decoder.MAXTEXT_VALUE_OUT,
    *decoder.MAXTEXT_MLP,
)

LLAMA = decoder.DecoderFamily(
    name="llama",
    model_types=("llama",),
    tables={
        "linen": decoder.LINEN_UNTIED,
        "tunix": decoder.TUNIX,
        **decoder.maxtext(decoder.scale_query(_MAXTEXT)),
    },
    refused=decoder.LINEN_BIASES,
    target_bases={"linen": "model"},
)
"""Llama 2 and 3."""
