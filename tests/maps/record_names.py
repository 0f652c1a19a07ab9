"""Records the names and shapes of small models, before and after a known conversion.

    python -m tests.maps.record_names [NAME ...]

Needs torch, transformers 4 (which has Flax classes) and tunix. Each model is filled
with distinct whole numbers, written by transformers, and converted by the code of its
own project. A file `names/NAME.json` then holds the shapes of both sides, and a
checksum of each converted leaf: the tests fill the source likewise, and compare.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

NAMES = Path(__file__).with_name("names")


def fill(shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns arrays of distinct whole numbers, in the order of the names."""
    arrays, start = {}, 0
    for name, shape in sorted(shapes.items()):
        size = int(np.prod(shape))
        arrays[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        start += size
    assert start < 2**24, "float32 holds no more whole numbers"
    return arrays


def checksum(array: Any) -> int:
    """Returns a checksum of an array of whole numbers."""
    return zlib.crc32(np.ascontiguousarray(array).astype(np.int32).tobytes())


def main(names: list[str]) -> None:
    for name, convert in RECORDED.items():
        if names and name not in names:
            continue
        source, leaves = convert()
        total = sum(array.size for array in source.values())
        record = {
            "source": {path: list(source[path].shape) for path in sorted(source)},
            "target": {
                path: [
                    list(leaf.shape),
                    None if is_new(leaf, total) else checksum(leaf),
                ]
                for path, leaf in sorted(leaves.items())
            },
        }
        lines = (
            json.dumps(part)
            + ": {\n"
            + ",\n".join(
                f"{json.dumps(path)}: {json.dumps(row)}" for path, row in rows.items()
            )
            + "\n}"
            for part, rows in record.items()
        )
        (NAMES / f"{name}.json").write_text("{" + ",\n".join(lines) + "}\n")
        print(name, len(source), len(leaves))  # noqa: T201


def is_new(leaf: np.ndarray, total: int) -> bool:
    """Returns True if a leaf was initialised, and has no values of the source."""
    return not (
        (leaf == np.round(leaf)).all()
        and 0 <= leaf.min() <= leaf.max() < total
        and np.unique(leaf).size == leaf.size
    )


def save_torch(model: Any, directory: str) -> dict[str, np.ndarray]:
    """Fills a torch model, saves it, and returns the saved arrays by leaf path."""
    import torch
    from safetensors.numpy import load_file, save_file

    model.save_pretrained(directory)
    file = Path(directory) / "model.safetensors"
    arrays = load_file(file)
    buffers = {n for n, v in arrays.items() if v.dtype != np.float32}
    filled = fill({n: v.shape for n, v in arrays.items() if n not in buffers})
    save_file({**arrays, **filled}, file, {"format": "pt"})
    del torch
    return {name.replace(".", "/"): value for name, value in filled.items()}


def flatten(tree: Any, above: str = "") -> dict[str, np.ndarray]:
    if not isinstance(tree, Mapping):
        return {above: np.asarray(tree)}
    return {
        path: leaf
        for key, inner in tree.items()
        for path, leaf in flatten(
            inner, f"{above}/{key}" if above else str(key)
        ).items()
    }


def flax_of(torch_class: str, flax_class: str, config: str, **options: Any) -> Callable:
    def convert() -> Any:
        import jax.numpy as jnp
        import transformers

        clip = jnp.clip  # T5 still passes a_max
        jnp.clip = lambda x, min=None, max=None, a_min=None, a_max=None: clip(
            x, min if a_min is None else a_min, max if a_max is None else a_max
        )
        made = getattr(transformers, config)(**options)
        with tempfile.TemporaryDirectory() as directory:
            source = save_torch(getattr(transformers, torch_class)(made), directory)
            model = getattr(transformers, flax_class).from_pretrained(
                directory, from_pt=True
            )
        return source, flatten(model.params)

    return convert


def tunix_of(
    torch_class: str,
    config: str,
    module: str,
    params: str,
    tunix: Mapping[str, Any],
    **options: Any,
) -> Callable:
    def convert() -> Any:
        import importlib

        import jax
        import transformers
        from flax import nnx

        made = getattr(transformers, config)(**options)
        module_lib = importlib.import_module(f"tunix.models.{module}.model")
        params_lib = importlib.import_module(f"tunix.models.{module}.{params}")
        sizes = dict(tunix)
        if module == "gemma":
            sizes["attention_types"] = [module_lib.AttentionType.GLOBAL] * 3
        with tempfile.TemporaryDirectory() as directory:
            source = save_torch(getattr(transformers, torch_class)(made), directory)
            model = params_lib.create_model_from_safe_tensors(
                directory,
                module_lib.ModelConfig(**sizes),
                dtype=jax.numpy.float32,
                mesh=jax.make_mesh((1, 1), ("fsdp", "tp")),
            )
        state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return source, flatten(state)

    return convert


TINY = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GQA = {**TINY, "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 131}
BERT = {**TINY, "intermediate_size": 40, "vocab_size": 131}
IMAGE = {"image_size": 16, "patch_size": 4}
SEQ2SEQ = {
    "d_model": 24, "encoder_layers": 3, "decoder_layers": 3,
    "encoder_attention_heads": 3, "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "vocab_size": 131, **TOKENS,
    "decoder_start_token_id": 1,
}  # fmt: skip
TUNIX = {
    "num_layers": 3, "embed_dim": 24, "hidden_dim": 40, "num_heads": 6,
    "num_kv_heads": 2, "head_dim": 8,
}  # fmt: skip
ROPE = {"rope_theta": 10_000, "norm_eps": 1e-6, "vocab_size": 131}
GEMMA = {
    "final_logit_softcap": None,
    "num_embed": 131,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
}

RECORDED: dict[str, Callable] = {
    "gpt2": flax_of("GPT2LMHeadModel", "FlaxGPT2LMHeadModel", "GPT2Config",
                    n_layer=3, n_embd=24, n_head=3, vocab_size=131, n_positions=32),
    "bert": flax_of("BertForMaskedLM", "FlaxBertForMaskedLM", "BertConfig", **BERT),
    "bert-pooler": flax_of("BertModel", "FlaxBertModel", "BertConfig", **BERT),
    "roberta": flax_of("RobertaForMaskedLM", "FlaxRobertaForMaskedLM", "RobertaConfig",
                       **BERT),
    "distilbert": flax_of("DistilBertModel", "FlaxDistilBertModel", "DistilBertConfig",
                          dim=24, n_layers=3, n_heads=3, hidden_dim=40, vocab_size=131),
    "vit": flax_of("ViTForImageClassification", "FlaxViTForImageClassification",
                   "ViTConfig", **TINY, intermediate_size=40, **IMAGE, num_labels=5),
    "dinov2": flax_of("Dinov2Model", "FlaxDinov2Model", "Dinov2Config",
                      **TINY, **IMAGE),
    "clip": flax_of("CLIPModel", "FlaxCLIPModel", "CLIPConfig",
                    text_config={**BERT, "bos_token_id": 1, "eos_token_id": 2},
                    vision_config={**TINY, "intermediate_size": 40, **IMAGE},
                    projection_dim=20),
    "whisper": flax_of("WhisperForConditionalGeneration",
                       "FlaxWhisperForConditionalGeneration", "WhisperConfig",
                       **SEQ2SEQ,
                       num_mel_bins=8, max_source_positions=12, max_target_positions=14,
                       suppress_tokens=None, begin_suppress_tokens=None),
    "t5": flax_of("T5ForConditionalGeneration", "FlaxT5ForConditionalGeneration",
                  "T5Config", d_model=24, num_layers=3, num_heads=3, d_ff=40, d_kv=6,
                  vocab_size=131, feed_forward_proj="gated-gelu",
                  tie_word_embeddings=False),
    "bart": flax_of("BartForConditionalGeneration", "FlaxBartForConditionalGeneration",
                    "BartConfig", **SEQ2SEQ, max_position_embeddings=32),
    "llama": flax_of("LlamaForCausalLM", "FlaxLlamaForCausalLM", "LlamaConfig", **GQA),
    "mistral": flax_of("MistralForCausalLM", "FlaxMistralForCausalLM", "MistralConfig",
                       **GQA, max_position_embeddings=64),
    "gemma": flax_of("GemmaForCausalLM", "FlaxGemmaForCausalLM", "GemmaConfig",
                     **{**GQA, "head_dim": 8}),
    "resnet": flax_of("ResNetForImageClassification",
                      "FlaxResNetForImageClassification", "ResNetConfig",
                      embedding_size=8, hidden_sizes=[8, 16, 24], depths=[2, 1, 2],
                      num_labels=5),
    "tunix-llama3": tunix_of("LlamaForCausalLM", "LlamaConfig", "llama3", "params",
                             {**TUNIX, **ROPE}, **GQA, head_dim=8),
    "tunix-llama3-square": tunix_of(
        "LlamaForCausalLM", "LlamaConfig", "llama3", "params",
        {**TUNIX, **ROPE, "num_heads": 6, "head_dim": 4, "num_kv_heads": 6},
        **{**GQA, "num_key_value_heads": 6}),
    "tunix-qwen2": tunix_of("Qwen2ForCausalLM", "Qwen2Config", "qwen2", "params",
                            {**TUNIX, **ROPE, "head_dim": 4}, **GQA),
    "tunix-qwen3": tunix_of("Qwen3ForCausalLM", "Qwen3Config", "qwen3", "params",
                            {**TUNIX, **ROPE}, **GQA, head_dim=8),
    "tunix-qwen3-moe": tunix_of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", "qwen3",
                            "params", {**TUNIX, **ROPE, "num_experts": 4,
                                       "num_experts_per_tok": 2},
                            **GQA, head_dim=8, num_experts=4, num_experts_per_tok=2,
                            moe_intermediate_size=40),
    "tunix-gemma2": tunix_of("Gemma2ForCausalLM", "Gemma2Config", "gemma",
                             "params_safetensors", {**TUNIX, **GEMMA}, **GQA,
                             head_dim=8),
    "tunix-gemma2-fused": tunix_of(
        "Gemma2ForCausalLM", "Gemma2Config", "gemma", "params_safetensors",
        {**TUNIX, **GEMMA, "num_kv_heads": 6}, **{**GQA, "num_key_value_heads": 6},
        head_dim=8),
    "tunix-gemma3": tunix_of("Gemma3ForCausalLM", "Gemma3TextConfig", "gemma3",
                             "params_safetensors", {**TUNIX, "num_embed": 131,
                                                    "sliding_window_size": 16}, **GQA,
                             head_dim=8),
}  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
