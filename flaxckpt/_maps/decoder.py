"""Tables that Llama, Mistral, Mixtral, Qwen and Gemma share.

Sources:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/llama/modeling_llama.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/llama/modeling_flax_llama.py
    https://github.com/google/tunix/blob/v0.1.7/tunix/models/llama3/model.py
    https://github.com/AI-Hypercomputer/maxtext/blob/e591f30/src/maxtext/checkpoint_conversion/utils/param_mapping.py
    https://github.com/AI-Hypercomputer/maxtext/blob/e591f30/src/maxtext/layers/attentions.py
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from flaxckpt._maps.family import Family, Tensor
from flaxckpt._maps.modules import head, linear, under

SIZES: dict[str, str | int] = {
    "i": "num_hidden_layers",
    "h": "num_attention_heads",
    "k": "num_key_value_heads|num_attention_heads",
    "d": "head_dim|hidden_size/num_attention_heads",
    "two": 2,
}
"""Layers, heads, heads of keys and values, and the size of a head."""

_QUERIES = "num_attention_heads*head_dim|hidden_size"
_KEYS = (
    "num_key_value_heads*head_dim|hidden_size/num_attention_heads*num_key_value_heads"
    "|num_attention_heads*head_dim|hidden_size"
)
_HEAD = "head_dim|hidden_size/num_attention_heads"
_MOE = "moe_intermediate_size|intermediate_size"

_ATTENTION = "model.layers.{i}.self_attn"
_FFN = "model.layers.{i}.mlp"
_EXPERT = "model.layers.{i}.{m:mlp|block_sparse_moe}.experts.{x}"
_GATE = "model.layers.{i}.{m:mlp|block_sparse_moe}.gate"

SHAPES = {
    "model.embed_tokens.weight": "vocab_size hidden_size",
    f"{_ATTENTION}.q_proj.weight": f"{_QUERIES} hidden_size",
    f"{_ATTENTION}.q_proj.bias": _QUERIES,
    f"{_ATTENTION}.{{p:k_proj|v_proj}}.weight": f"{_KEYS} hidden_size",
    f"{_ATTENTION}.{{p:k_proj|v_proj}}.bias": _KEYS,
    f"{_ATTENTION}.o_proj.weight": f"hidden_size {_QUERIES}",
    f"{_ATTENTION}.o_proj.bias": "hidden_size",
    f"{_ATTENTION}.{{q:q_norm|k_norm}}.weight": _HEAD,
    f"{_FFN}.{{m:gate_proj|up_proj}}.weight": "intermediate_size hidden_size",
    f"{_FFN}.down_proj.weight": "hidden_size intermediate_size",
    f"{_GATE}.weight": "num_experts|num_local_experts hidden_size",
    f"{_EXPERT}.{{w:gate_proj|up_proj|w1|w3}}.weight": f"{_MOE} hidden_size",
    f"{_EXPERT}.{{w:down_proj|w2}}.weight": f"hidden_size {_MOE}",
    "model.norm.weight": "hidden_size",
    "lm_head.weight": "vocab_size hidden_size",
}
"""Shapes of the tensors of all decoders."""

BUFFERS = r".*/rotary_emb/inv_freq"
COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
TIED = "tie_word_embeddings"

_NO_BIASES = "the program of this layout has no such biases"
BIASES = {"attention_bias": _NO_BIASES, "mlp_bias": _NO_BIASES}
LINEN_BIASES = {
    "attention_bias and not target=linen": _NO_BIASES,
    "mlp_bias": _NO_BIASES,
}
"""Configurations that are refused, without and with the Flax classes."""

_LAYER = "model.layers.{i}"
_NORMS = "{n:input|post_attention}_layernorm"
_MLP = "{m:gate_proj|up_proj|down_proj}"

_PROJECTIONS = "{p:q_proj|k_proj|v_proj|o_proj}"

LANGUAGE = (
    "not architectures=*For*Classification* and not architectures=*QuestionAnswering*"
    " and not architectures=*[!ds]Model'*"
)
"""Models with a head over the vocabulary: no other class, and not the base alone."""

UNTIED = f"{LANGUAGE} and not {TIED}"
OWN_HEAD = f"{LANGUAGE} and {TIED}"

SCORE = (
    *under("architectures=*For[ST]*Classification*", head(linear("score", bias=False))),
    *under("architectures=*ForTokenClassification*", head(linear("score")[1:])),
)
"""The heads of other classes."""

LINEN = (
    Tensor("model.embed_tokens.weight", "model/embed_tokens/embedding"),
    Tensor(
        f"{_LAYER}.self_attn.{_PROJECTIONS}.weight",
        f"model/layers/{{i}}/self_attn/{_PROJECTIONS}/kernel",
        "o e -> e o",
    ),
    Tensor(
        f"{_LAYER}.self_attn.{_PROJECTIONS}.bias",
        f"model/layers/{{i}}/self_attn/{_PROJECTIONS}/bias",
        when="attention_bias",
    ),
    Tensor(
        f"{_LAYER}.mlp.{_MLP}.weight",
        f"model/layers/{{i}}/mlp/{_MLP}/kernel",
        "o e -> e o",
    ),
    Tensor(f"{_LAYER}.{_NORMS}.weight", f"model/layers/{{i}}/{_NORMS}/weight"),
    Tensor("model.norm.weight", "model/norm/weight"),
    Tensor("lm_head.weight", "lm_head/kernel", "v e -> e v", UNTIED, is_head=True),
    *SCORE,
)

LINEN_UNTIED = (
    *LINEN,
    Tensor("model.embed_tokens.weight", "lm_head/kernel", "v e -> e v", OWN_HEAD),
)
"""For classes whose head has a kernel of its own, even if the checkpoint ties it."""

TUNIX_ATTENTION = (
    Tensor("model.embed_tokens.weight", "embedder/input_embedding"),
    Tensor(
        f"{_LAYER}.self_attn.q_proj.weight",
        "layers/{i}/attn/q_proj/w",
        "(h d) e -> e h d",
    ),
    Tensor(
        f"{_LAYER}.self_attn.{{p:k_proj|v_proj}}.weight",
        "layers/{i}/attn/{p:k_proj|v_proj}/w",
        "(k d) e -> e k d",
    ),
    Tensor(
        f"{_LAYER}.self_attn.o_proj.weight",
        "layers/{i}/attn/o_proj/w",
        "e (h d) -> h d e",
    ),
    Tensor(f"{_LAYER}.{_NORMS}.weight", f"layers/{{i}}/{_NORMS}/w"),
    Tensor("model.norm.weight", "final_norm/w"),
    Tensor("lm_head.weight", "lm_head/w", "v e -> e v", UNTIED),
)

TUNIX = (
    *TUNIX_ATTENTION,
    Tensor(
        f"{_LAYER}.mlp.{_MLP}.weight", f"layers/{{i}}/mlp/{_MLP}/kernel", "o e -> e o"
    ),
)

# MaxText without scanned layers, below `params/params` of its checkpoints.

MAXTEXT_EMBEDDING = (
    Tensor("model.embed_tokens.weight", "token_embedder/embedding"),
    Tensor("model.norm.weight", "decoder/decoder_norm/scale"),
    Tensor("lm_head.weight", "decoder/logits_dense/kernel", "v e -> e v", UNTIED),
)

MAXTEXT_NORMS = (
    Tensor(
        f"{_LAYER}.{_NORMS}.weight",
        "decoder/layers_{i}/{n:pre|post}_self_attention_layer_norm/scale",
    ),
)


def maxtext_mlp(source: str, target: str) -> tuple[Tensor, ...]:
    names = "{m:wi_0|wi_1|wo}"
    form = "o e -> e o"
    return (Tensor(f"{source}.mlp.{_MLP}.weight", f"{target}/{names}/kernel", form),)


def maxtext_attention(source: str, target: str) -> tuple[Tensor, ...]:
    """Returns the rows of queries, keys, values and the output of attention."""
    of_keys = "(k d) e -> e k d"
    old, new = f"{source}.self_attn", target
    return (
        Tensor(f"{old}.q_proj.weight", f"{new}/query/kernel", "(h d) e -> e h d"),
        Tensor(f"{old}.k_proj.weight", f"{new}/key/kernel", of_keys),
        Tensor(f"{old}.v_proj.weight", f"{new}/value/kernel", of_keys),
        Tensor(f"{old}.o_proj.weight", f"{new}/out/kernel", "e (h d) -> h d e"),
    )


MAXTEXT_MLP = maxtext_mlp(_LAYER, "decoder/layers_{i}/mlp")
MAXTEXT_ATTENTION = maxtext_attention(_LAYER, "decoder/layers_{i}/self_attention")
MAXTEXT_QUERY_KEY, MAXTEXT_VALUE_OUT = MAXTEXT_ATTENTION[:2], MAXTEXT_ATTENTION[2:]


def scale_query(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns a table of MaxText whose queries contain the scale of attention."""
    return tuple(
        tensor._replace(times="d", exponent=-0.5)
        if tensor.target.endswith("/query/kernel")
        else tensor
        for tensor in tensors
    )


def scan(tensors: Sequence[Tensor], index: str = "i") -> tuple[Tensor, ...]:
    """Returns a table of MaxText for scanned layers, stacked along the second axis."""
    layers = f"layers_{{{index}}}"
    return tuple(
        tensor._replace(
            target=tensor.target.replace(layers, "layers"),
            form=_scan_form(tensor.form or "w -> w", index),
        )
        if layers in tensor.target
        else tensor
        for tensor in tensors
    )


def _scan_form(form: str, index: str) -> str:
    left, _, right = form.partition(" -> ")
    first, _, others = right.partition(" ")
    return f"{index} {left} -> {first} {index} {others}".rstrip()


def maxtext(tensors: Sequence[Tensor], index: str = "i") -> dict[str, Sequence[Tensor]]:
    """Returns the tables of MaxText without and with scanned layers."""
    return {"maxtext": tensors, "maxtext-scanned": scan(tensors, index)}


DecoderFamily = functools.partial(
    Family,
    base="model",
    sizes=SIZES,
    defaults={"tie_word_embeddings": False},
    ignored=BUFFERS,
    copies=COPIES,
    shapes=SHAPES,
)
"""A family with what most decoders share."""
