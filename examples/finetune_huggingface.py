"""Fine-tunes a model of Hugging Face on eight devices, and gives it back.

    python -m examples.finetune_huggingface runs/finetune_huggingface

Takes a directory as published on Hugging Face (`--model`; by default a tiny Llama with
random weights, made here), maps it to a Linen module, shards it over eight devices of
the CPU, trains it for 20 steps, and exports it. If `transformers` and `torch` are
installed, they open the exported model, and the logits are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import maps

STEPS = 20
DEVICES = 8
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
"""Of the model that is made here."""

SHARDING = [
    (r"params/.*/(embedding|o_proj/kernel|down_proj/kernel)", P("model", None)),
    (r"params/.*/kernel", P(None, "model")),
    (".*", P()),
]


def main(workdir: Path, model: Path | None = None) -> dict[str, float]:
    """Maps, trains and exports a model.

    Args:
        workdir: Directory for the run, and for the exported model.
        model: Directory of the published model; by default a new one in `workdir`.

    Returns:
        The `first` and the `last` loss if steps were taken, and the largest
        `difference` to the logits of transformers: NaN if it is not installed.
    """
    if model is None:
        model = workdir / "published"
        if not model.exists():
            publish(model)
    config = json.loads((model / "config.json").read_text())
    losses = train(workdir / "run", model, config)
    for name, loss in losses.items():
        print(f"{name} loss: {loss:.3f}")

    tuned = workdir / "tuned"
    flaxckpt.export_huggingface(
        workdir / "run", tuned, config=model, tokenizer=model, overwrite=True
    )
    print(f"exported to {tuned}: {', '.join(sorted(p.name for p in tuned.iterdir()))}")
    difference = compare(workdir / "run", tuned, config)
    return {**losses, "difference": difference}


# ---- the model ----------------------------------------------------------------------


class Llama(nn.Module):
    """A Llama, with the names of Hugging Face's Flax classes."""

    config: dict[str, Any]

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Maps tokens `[batch, length]` to logits `[batch, length, vocabulary]`."""
        vocabulary: int = self.config["vocab_size"]
        x = Trunk(self.config, name="model")(ids)
        logits: jax.Array = nn.Dense(vocabulary, use_bias=False, name="lm_head")(x)
        return logits


class Trunk(nn.Module):
    """The layers, between the embedding and the head."""

    config: dict[str, Any]

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        sizes = self.config["vocab_size"], self.config["hidden_size"]
        x: jax.Array = nn.Embed(*sizes, name="embed_tokens")(ids)
        x = Layers(self.config, name="layers")(x)
        return Norm(self.config["rms_norm_eps"], name="norm")(x)


class Layers(nn.Module):
    """The layers, named by their numbers."""

    config: dict[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(self.config["num_hidden_layers"]):
            x = Layer(self.config, name=str(number))(x)
        return x


class Layer(nn.Module):
    """Attention and an MLP, each with a norm before and a residual around."""

    config: dict[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        eps = self.config["rms_norm_eps"]
        normed = Norm(eps, name="input_layernorm")(x)
        x += Attention(self.config, name="self_attn")(normed)
        normed = Norm(eps, name="post_attention_layernorm")(x)
        return x + Mlp(self.config, name="mlp")(normed)


class Norm(nn.Module):
    """RMS normalisation."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        square = jnp.mean(x**2, axis=-1, keepdims=True)
        normed: jax.Array = weight * x * jax.lax.rsqrt(square + self.eps)
        return normed


class Attention(nn.Module):
    """Causal attention; several heads of queries share a head of keys and values."""

    config: dict[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.config["num_attention_heads"]
        shared = self.config["num_key_value_heads"]
        size = self.config["hidden_size"] // heads
        batch, length, width = x.shape

        def project(name: str, count: int) -> jax.Array:
            y = nn.Dense(count * size, use_bias=False, name=name)(x)
            return y.reshape(batch, length, count, size)

        query = rotate(project("q_proj", heads), self.config["rope_theta"])
        key = rotate(project("k_proj", shared), self.config["rope_theta"])
        value = project("v_proj", shared)
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        y = y.reshape(batch, length, heads * size)
        output: jax.Array = nn.Dense(width, use_bias=False, name="o_proj")(y)
        return output


class Mlp(nn.Module):
    """A gated MLP."""

    config: dict[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inner: int = self.config["intermediate_size"]
        gate = nn.silu(nn.Dense(inner, use_bias=False, name="gate_proj")(x))
        up = nn.Dense(inner, use_bias=False, name="up_proj")(x)
        width = x.shape[-1]
        output: jax.Array = nn.Dense(width, use_bias=False, name="down_proj")(gate * up)
        return output


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Returns `x` of `[batch, length, heads, size]` with rotary position embeddings."""
    length, half = x.shape[1], x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half) / half)
    angles = jnp.arange(length)[:, None, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


# ---- the published model ------------------------------------------------------------


def publish(directory: Path) -> None:
    """Writes a tiny model with random weights, as published on Hugging Face."""
    if has_transformers():
        import transformers

        transformers.set_seed(0)
        config = transformers.LlamaConfig(**CONFIG)
        transformers.LlamaForCausalLM(config).save_pretrained(directory)
    else:
        params = init(CONFIG)["params"]
        flaxckpt.save(directory.with_name("new"), params, overwrite=True)
        flaxckpt.export_huggingface(
            directory.with_name("new"), directory, config=CONFIG
        )
    (directory / "tokenizer.json").write_text("{}")


def init(config: dict[str, Any]) -> Any:
    """Returns random variables of the module."""
    return Llama(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))


def has_transformers() -> bool:
    """Returns True if transformers and torch are installed."""
    return all(importlib.util.find_spec(name) for name in ("transformers", "torch"))


# ---- training -----------------------------------------------------------------------


def train(directory: Path, model: Path, config: dict[str, Any]) -> dict[str, float]:
    """Trains, from the published `model` at first.

    Returns:
        The `first` and the `last` loss; empty if the run is finished.
    """
    mesh = Mesh(np.reshape(jax.devices(), (2, DEVICES // 2)), ("data", "model"))
    # Nothing is initialized: the model is read in parts, straight to its devices.
    abstract = flaxckpt.abstract_state(
        lambda: TrainState.create(
            apply_fn=Llama(config).apply,
            params=init(config)["params"],
            tx=optax.adamw(3e-3),
        ),
        mesh=mesh,
        leaf_rules=SHARDING,
    )
    losses: dict[str, float] = {}
    with (
        flaxckpt.Checkpointer(directory) as checkpointer,
        flaxckpt.CheckpointCallback(checkpointer, every_steps=10) as on_step,
    ):
        state, start = on_step.restore_or_init(
            abstract, source=model, source_map="auto"
        )
        for step in range(start + 1, STEPS + 1):
            state, loss = train_step(state, batch(step, config, mesh))
            losses = {"first": float(loss), **losses, "last": float(loss)}
            on_step(step, state)
    kernel = state.params["model"]["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    print(f"up_proj is sharded: {kernel.sharding.spec} over {dict(mesh.shape)}")
    return losses


@jax.jit
def train_step(state: TrainState, ids: jax.Array) -> tuple[TrainState, jax.Array]:
    """Takes one step; returns the new state and the loss."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, ids[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
        return jnp.mean(losses)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def batch(step: int, config: dict[str, Any], mesh: Mesh) -> jax.Array:
    """Returns sequences that count upwards from random numbers."""
    starts = np.random.default_rng(step).integers(config["vocab_size"], size=(8, 1))
    ids = (starts + np.arange(17)) % config["vocab_size"]
    sharding = NamedSharding(mesh, P("data"))
    sharded: jax.Array = jax.device_put(ids.astype(np.int32), sharding)
    return sharded


# ---- the way back -------------------------------------------------------------------


def compare(run: Path, tuned: Path, config: dict[str, Any]) -> float:
    """Compares the exported model with the run, by transformers if installed.

    Returns:
        The largest difference of the logits; NaN without transformers.

    Raises:
        SystemExit: The models differ.
    """
    changes = maps.llama(config, target="linen", prefix="params")
    params = flaxckpt.load(run).params
    back = flaxckpt.load(tuned, transforms=changes)["params"]
    jax.tree.map(np.testing.assert_array_equal, back, params)
    print("the exported arrays are those of the run")
    if not has_transformers():
        print("transformers is not installed: its logits are not compared")
        return float("nan")
    import torch
    import transformers

    ids = np.arange(2 * 16).reshape(2, 16) * 5 % config["vocab_size"]
    opened = transformers.AutoModelForCausalLM.from_pretrained(tuned)
    with torch.no_grad():
        wanted = opened(input_ids=torch.from_numpy(ids)).logits.numpy()
    found = Llama(config).apply({"params": params}, ids)
    difference = float(np.abs(wanted - found).max())
    print(f"logits of transformers differ by at most {difference:.1e}")
    if difference > 1e-4:
        raise SystemExit("the logits of transformers are others")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main(options.workdir, options.model)
