"""Qwen 3 with mixtures of experts in all layers; the sources are those of `_qwen3`."""

from __future__ import annotations

from flaxckpt._maps import decoder, qwen3
from flaxckpt._maps.family import Family, Tensor

_ROUTER = "model.layers.{i}.mlp.gate.weight"
_EXPERTS = "model.layers.{i}.mlp.experts.{x}.{m:gate_proj|up_proj|down_proj}.weight"

_MAXTEXT = (
    *qwen3.MAXTEXT,
    Tensor(_ROUTER, "decoder/layers_{i}/moe_block/gate/kernel", "x e -> e x"),
    Tensor(_EXPERTS, "decoder/layers_{i}/moe_block/{m:wi_0|wi_1|wo}", "x o e -> x e o"),
)

_DENSE = "its layers without experts have no place in the programs of these layouts"

QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    base="model",
    sizes={**decoder.SIZES, "x": "num_experts"},
    tables={
        "tunix": (
            *decoder.TUNIX_ATTENTION,
            *qwen3.TUNIX_NORMS,
            Tensor(_ROUTER, "layers/{i}/mlp/router/kernel", "x e -> e x"),
            Tensor(
                _EXPERTS,
                "layers/{i}/mlp/{m:gate_proj|up_proj|down_proj}",
                "x o e -> x e o",
            ),
        ),
        "maxtext": _MAXTEXT,
        "maxtext-scanned": decoder.scan(_MAXTEXT),
    },
    defaults={"tie_word_embeddings": False, "decoder_sparse_step": 1},
    ignored=decoder.BUFFERS,
    copies=decoder.COPIES,
    shapes=decoder.SHAPES,
    refused={
        **decoder.BIASES,
        "mlp_only_layers": _DENSE,
        "not decoder_sparse_step=1": _DENSE,
    },
)
"""Qwen 3 with mixtures of experts in all layers."""
