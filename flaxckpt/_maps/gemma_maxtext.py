"""Tables of MaxText that Gemma 2 and 3 share; the sources are those of `decoder`."""

from __future__ import annotations

from flaxckpt._maps import decoder
from flaxckpt._maps.family import Tensor

_NORMS = "{n:input|post_attention|pre_feedforward|post_feedforward}_layernorm"
_TARGET_NORMS = "{n:pre_self_attention|post_self_attention|pre_ffw|post_ffw}_norm"


def embedding(factor_dtype: str) -> tuple[Tensor, ...]:
    """Returns the rows outside of layers, for the type of the root of the width."""
    table = Tensor("model.embed_tokens.weight", "token_embedder/embedding")
    return (
        table._replace(times="width", exponent=0.5, factor_dtype=factor_dtype),
        Tensor("model.norm.weight", "decoder/decoder_norm/scale", plus=1),
    )


def layers(source: str, target: str, kind: str = "") -> tuple[Tensor, ...]:
    """Returns the rows of layers; `kind` is the end of the names of their modules."""
    norms = f"{target}/{_TARGET_NORMS}{kind}/scale"
    return (
        *decoder.maxtext_attention(source, f"{target}/self_attention{kind}"),
        *decoder.maxtext_mlp(source, f"{target}/mlp{kind}"),
        Tensor(f"{source}.{_NORMS}.weight", norms, plus=1),
    )
