"""`suggest` on real models: torch's model and the JAX model give equal outputs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flaxckpt
from tests.maps.record_names import BERT, GQA, IMAGE, ROPE, SEQ2SEQ, TINY, TUNIX

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)
pytest.importorskip(
    "transformers.modeling_flax_utils",
    reason="this release of transformers has no Flax classes",
)

TOKENS = np.random.default_rng(0).integers(3, 131, (2, 9))
PIXELS = np.random.default_rng(1).standard_normal((2, 3, 16, 16), np.float32)
SOUND = np.random.default_rng(2).standard_normal((2, 8, 24), np.float32)

TEXT = {"input_ids": TOKENS}
BOTH = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :5]}

# Torch's class, its config, the options, and the inputs.
FLAX: dict[str, tuple[str, str, dict[str, Any], dict[str, np.ndarray]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_layer": 3, "n_embd": 24, "n_head": 3, "vocab_size": 131, "n_positions": 32},
        TEXT,
    ),
    "bert": ("BertForMaskedLM", "BertConfig", BERT, TEXT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", BERT, TEXT),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**TINY, **IMAGE, "intermediate_size": 40, "num_labels": 5},
        {"pixel_values": PIXELS},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "max_target_positions": 14,
        },
        {"input_features": SOUND, "decoder_input_ids": TOKENS[:, :5]},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**SEQ2SEQ, "max_position_embeddings": 32},
        BOTH,
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**GQA, "max_position_embeddings": 64},
        TEXT,
    ),
    "mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {**GQA, "max_position_embeddings": 64},
        TEXT,
    ),
}


def save_torch(
    torch_class: str, config: Any, directory: Path
) -> tuple[Path, torch.nn.Module]:
    """Returns a random model, and the file that transformers has written."""
    torch.manual_seed(0)
    model = getattr(transformers, torch_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are not all 1 and 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory / "model.safetensors", model


def outputs_of(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        return model(**{k: torch.tensor(v) for k, v in inputs.items()}).logits.numpy()


@pytest.mark.parametrize("name", FLAX)
def test_transformers_flax_model_gives_equal_logits(name, tmp_path):
    torch_class, config_class, options, inputs = FLAX[name]
    config = getattr(transformers, config_class)(**options)
    source, model = save_torch(torch_class, config, tmp_path)
    flax_model = getattr(transformers, f"Flax{torch_class}")(config)
    suggestion = flaxckpt.suggest(source, flax_model.params)
    assert not suggestion.ambiguous
    assert not suggestion.left
    params = flaxckpt.load(
        source, flax_model.params, transforms=suggestion.transforms, unused="ignore"
    )
    own = getattr(transformers, f"Flax{torch_class}").from_pretrained(
        tmp_path, from_pt=True
    )
    jax.tree.map(np.testing.assert_array_equal, params, own.params)
    logits = flax_model(**inputs, params=params).logits
    np.testing.assert_allclose(logits, outputs_of(model, inputs), atol=1e-5, rtol=1e-5)


# Tunix's attention of Llama and Qwen 3 has this base, whatever its config says.
BASE = {"rope_theta": 1_000_000.0}

TUNIX_MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama3": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**GQA, **BASE, "head_dim": 8, "rms_norm_eps": 1e-6},
        {**TUNIX, **ROPE},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GQA, {**TUNIX, **ROPE, "head_dim": 4}),
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**GQA, **BASE, "head_dim": 8},
        {**TUNIX, **ROPE},
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jax, in Tunix
@pytest.mark.parametrize("name", TUNIX_MODELS)
def test_tunix_model_gives_equal_logits(name, tmp_path):
    pytest.importorskip("tunix", reason="tunix is not installed")
    torch_class, config_class, options, sizes = TUNIX_MODELS[name]
    config = getattr(transformers, config_class)(**options)
    source, model = save_torch(torch_class, config, tmp_path)
    models = importlib.import_module(f"tunix.models.{name}.model")
    made = type_of(models, name)(models.ModelConfig(**sizes), rngs=nnx.Rngs(0))
    graph, abstract = nnx.split(made)
    suggestion = flaxckpt.suggest(source, abstract)
    assert not suggestion.ambiguous
    assert not suggestion.left
    state = flaxckpt.load(source, abstract, transforms=suggestion.transforms)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((9, 9), bool)), (2, 9, 9))
    logits, _ = nnx.merge(graph, state)(jnp.asarray(TOKENS), positions, None, mask)
    wanted = outputs_of(model, {"input_ids": TOKENS})
    np.testing.assert_allclose(logits, wanted, atol=1e-5, rtol=1e-5)


def type_of(models: Any, name: str) -> Any:
    return getattr(models, name.capitalize())
