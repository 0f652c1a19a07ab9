"""Models in GGUF files: the names and values of llama.cpp, as Hugging Face has them.

Sources:
    https://github.com/ggml-org/llama.cpp/blob/gguf-v0.19.0/gguf-py/gguf/constants.py
    https://github.com/ggml-org/llama.cpp/blob/gguf-v0.19.0/gguf-py/gguf/tensor_mapping.py
    https://github.com/ggml-org/llama.cpp/blob/gguf-v0.19.0/convert_hf_to_gguf.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from flaxckpt import errors
from flaxckpt._formats.reader import Stored
from flaxckpt._maps import decoder
from flaxckpt._maps.family import Family, Tensor
from flaxckpt._types import JSON
from flaxckpt.transforms import Transform, inverse

FORMAT = "gguf"

_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""Architecture in the file -> model type. Files of Mistral say `llama`, too."""

_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
"""Key of a configuration -> key in the file, below the architecture."""

_LAYER = "model.layers.{i}"
_ROPE_FACTORS = "rope_freqs/weight"

_COMMON = (
    Tensor("model.embed_tokens.weight", "token_embd/weight"),
    Tensor(
        f"{_LAYER}.self_attn.{{p:v_proj|o_proj}}.weight",
        "blk/{i}/{p:attn_v|attn_output}/weight",
    ),
    Tensor(
        f"{_LAYER}.mlp.{{m:gate_proj|up_proj|down_proj}}.weight",
        "blk/{i}/{m:ffn_gate|ffn_up|ffn_down}/weight",
    ),
    Tensor("lm_head.weight", "output/weight", when=f"not {decoder.TIED}"),
)
_NORMS = (
    Tensor("model.norm.weight", "output_norm/weight"),
    Tensor(f"{_LAYER}.input_layernorm.weight", "blk/{i}/attn_norm/weight"),
)
_SECOND_NORM = Tensor(
    f"{_LAYER}.post_attention_layernorm.weight", "blk/{i}/ffn_norm/weight"
)
_QUERY_KEY = Tensor(
    f"{_LAYER}.self_attn.{{q:q_proj|k_proj}}.weight", "blk/{i}/{q:attn_q|attn_k}/weight"
)
_QUERY_KEY_NORMS = Tensor(
    f"{_LAYER}.self_attn.{{q:q_norm|k_norm}}.weight",
    "blk/{i}/{q:attn_q_norm|attn_k_norm}/weight",
)
_GEMMA2_NORMS = Tensor(
    f"{_LAYER}.{{n:post_attention|pre_feedforward|post_feedforward}}_layernorm.weight",
    "blk/{i}/{n:post_attention_norm|ffn_norm|post_ffw_norm}/weight",
)


def _greater(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns norms of Gemma, which llama.cpp stores greater by 1."""
    return tuple(tensor._replace(plus=1) for tensor in tensors)


_ROWS: dict[str, Sequence[Tensor]] = {
    "llama": (
        *_COMMON,
        *_NORMS,
        _SECOND_NORM,
        # Rotary halves, interleaved.
        Tensor(
            f"{_LAYER}.self_attn.q_proj.weight",
            "blk/{i}/attn_q/weight",
            "(h two p) e -> (h p two) e",
        ),
        Tensor(
            f"{_LAYER}.self_attn.k_proj.weight",
            "blk/{i}/attn_k/weight",
            "(k two p) e -> (k p two) e",
        ),
    ),
    "qwen2": (
        *_COMMON,
        *_NORMS,
        _SECOND_NORM,
        _QUERY_KEY,
        Tensor(
            f"{_LAYER}.self_attn.{{b:q_proj|k_proj|v_proj}}.bias",
            "blk/{i}/{b:attn_q|attn_k|attn_v}/bias",
        ),
    ),
    "qwen3": (*_COMMON, *_NORMS, _SECOND_NORM, _QUERY_KEY, _QUERY_KEY_NORMS),
    "gemma": (*_COMMON, _QUERY_KEY, *_greater(*_NORMS, _SECOND_NORM)),
    "gemma2": (*_COMMON, _QUERY_KEY, *_greater(*_NORMS, _GEMMA2_NORMS)),
    "gemma3": (
        *_COMMON,
        _QUERY_KEY,
        *_greater(*_NORMS, _GEMMA2_NORMS, _QUERY_KEY_NORMS),
    ),
}
"""Name of a family -> its tensors in a file."""


def make_config(stored: Stored) -> dict[str, JSON]:
    """Returns the configuration that the key-values of a GGUF file imply."""
    values = stored.metadata.custom
    architecture = values.get("general.architecture")
    kind = _TYPES.get(str(architecture))
    if kind is None:
        raise errors.OptionError(
            f"{stored.metadata.path} is of the architecture {architecture!r:.80}, which"
            f" has no map: there are maps of {', '.join(_TYPES)}"
        )
    config: dict[str, JSON] = {
        "model_type": kind,
        "tie_word_embeddings": "output/weight" not in stored.table,
    }
    for key, below in _KEYS.items():
        if (value := values.get(f"{architecture}.{below}")) is not None:
            config[key] = value
    if _ROPE_FACTORS in stored.table:
        config["rope_scaling"] = {"rope_type": "llama3"}
    return config


def to_published(family: Family, config: Mapping[str, JSON]) -> list[Transform]:
    """Returns the transforms from the leaves of a GGUF file to published names."""
    if family.name not in _ROWS:
        raise errors.OptionError(f"there is no map from GGUF files for {family.name}")
    of_file = dataclasses.replace(
        family, tables={FORMAT: _ROWS[family.name]}, unpublished={FORMAT: _ROPE_FACTORS}
    )
    return inverse(of_file(config, target=FORMAT))
