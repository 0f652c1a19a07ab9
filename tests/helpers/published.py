"""Tiny models as published on Hugging Face, without torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def llama_tensors(*, seed: int = 0, base_alone: bool = False) -> dict[str, np.ndarray]:
    """Returns random tensors of a Llama, with the names of transformers.

    Args:
        seed: The seed.
        base_alone: True for the model without its head.
    """
    width, inner, kv = 24, 20, 8
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (31, width),
        "norm.weight": (width,),
    }
    for i in range(3):
        layer = {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    if not base_alone:
        shapes = {f"model.{name}": shape for name, shape in shapes.items()}
        shapes["lm_head.weight"] = (31, width)
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def write_llama(directory: Path, **options: Any) -> Path:
    """Writes a directory with arrays, config and tokenizer; returns the directory."""
    directory.mkdir(parents=True)
    safetensors.save_file(
        llama_tensors(**options), directory / "model.safetensors", {"format": "pt"}
    )
    (directory / "config.json").write_text(json.dumps(LLAMA))
    for name in ("tokenizer.json", "generation_config.json"):
        (directory / name).write_text(json.dumps({"name": name}))
    return directory


def decoder_tensors(
    layers: int,
    *,
    begin: str = "model.",
    norms: Sequence[str] = ("input", "post_attention"),
    more: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """Returns random tensors of a small decoder, without a head.

    Args:
        layers: The number of layers.
        begin: What all names begin with.
        norms: The norms of a layer.
        more: The norms of its attention.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (11, 6), "norm": (6,)}
    for i in range(layers):
        layer = {
            "self_attn.q_proj": (8, 6),
            **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (4, 6)),
            "self_attn.o_proj": (6, 8),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (5, 6)),
            "mlp.down_proj": (6, 5),
            **dict.fromkeys((f"self_attn.{norm}" for norm in more), (4,)),
            **dict.fromkeys((f"{norm}_layernorm" for norm in norms), (6,)),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    return {
        f"{begin}{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write(directory: Path, tensors: dict[str, np.ndarray], config: Any) -> Path:
    """Writes tensors, whose names may be paths, and a config; returns the directory."""
    directory.mkdir()
    named = {name.replace("/", "."): value for name, value in tensors.items()}
    safetensors.save_file(named, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory
