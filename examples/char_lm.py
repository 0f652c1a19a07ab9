"""Trains a character-level transformer (Flax linen) on the Python reference manual.

Needs no download: every CPython ships the manual's text in `pydoc_data.topics`.

    python -m examples.char_lm --config=configs/char_lm.py --workdir=runs/char_lm

Stop it at any time, even with `kill -9`, and run the same command again: training
continues from the newest checkpoint, and ends with the same parameters, bit for bit,
as an uninterrupted run. Each checkpoint has everything that this needs: parameters,
optimizer state, dropout key, and the position of the dataset iterator.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax.training import train_state
from ml_collections import ConfigDict, config_flags

import flaxckpt
from flaxckpt.configs import CheckpointConfig


def main(config: ConfigDict) -> tuple[TrainState, dict[str, float]]:
    """Trains to `config.total_steps`, from the newest checkpoint if there is one.

    Returns:
        The final state, and the metrics of its evaluation.
    """
    corpus = load_corpus(config.context)
    train_iter = train_batches(corpus, config)
    checkpointing = CheckpointConfig.from_mapping(config.checkpoint)
    state = create_train_state(config, len(corpus.alphabet))
    metrics: dict[str, float] = {}
    with (
        checkpointing.checkpointer(config.workdir) as ckpt,
        checkpointing.callback(ckpt, dataset=train_iter) as on_step,
    ):
        state, start = on_step.restore_or_init(state)
        if start:
            print(f"found step {start} in {config.workdir}: continuing from there")
            metrics = dict(ckpt.metrics(start))
        for step in range(start + 1, config.total_steps + 1):
            state, loss = train_step(state, next(train_iter))

            # Evaluate before the save, so that the checkpoint has the metrics.
            is_evaluated = step % config.eval_every == 0 or step == config.total_steps
            if is_evaluated:
                metrics = evaluate(state, corpus, config)
                print(
                    f"step {step:5d}   train loss {loss:.3f}"
                    f"   eval loss {metrics['eval/loss']:.3f}"
                    f"   ({metrics['eval/bits_per_char']:.2f} bits per character)"
                )
            previous = on_step.last_save
            if on_step(step, state, metrics=metrics if is_evaluated else None):
                log_save(previous, config.workdir)  # finished: saves do not overlap
    log_save(on_step.last_save, config.workdir)
    return state, metrics


def log_save(save: flaxckpt.SaveHandle | None, workdir: str) -> None:
    """Appends the result of a save to `saves.jsonl`."""
    if save is not None:
        with Path(workdir, "saves.jsonl").open("a") as file:
            file.write(json.dumps(dataclasses.asdict(save.wait())) + "\n")


# --- Data -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
    """A text as windows of character numbers, split by topic.

    Attributes:
        alphabet: The characters of the text; a character's number is its index.
        train: All windows of the training topics, `[windows, context + 1]`.
        validation: Windows of the other topics, without overlap.
    """

    alphabet: str
    train: np.ndarray
    validation: np.ndarray


def load_corpus(context: int) -> Corpus:
    """Reads the language reference; one topic in eight is for validation."""
    texts = distinct_topics()
    alphabet = "".join(sorted(set("".join(texts))))
    numbers = {char: i for i, char in enumerate(alphabet)}

    def windows(texts: list[str]) -> np.ndarray:
        text = np.array([numbers[char] for char in "".join(texts)], np.int32)
        return np.lib.stride_tricks.sliding_window_view(text, context + 1)

    train = [text for i, text in enumerate(texts) if i % 8 != 4]
    return Corpus(alphabet, windows(train), windows(texts[4::8])[:: context + 1])


def distinct_topics() -> list[str]:
    """Returns the topics, longest first, without topics that are part of a longer one.

    For example, the topic `for` is a section of `compound`: if each split had one of
    them, the validation loss would be too low.
    """
    distinct: list[str] = []
    for text in sorted(pydoc_data.topics.topics.values(), key=len, reverse=True):
        excerpt = text[len(text) // 2 :][:200]
        if not any(excerpt in longer for longer in distinct):
            distinct.append(text)
    return distinct


def train_batches(corpus: Corpus, config: ConfigDict) -> Iterator[np.ndarray]:
    """Returns an infinite iterator of shuffled batches that can save its position."""
    dataset = grain.MapDataset.source(corpus.train).seed(config.seed).shuffle()
    batches: Iterator[np.ndarray] = iter(dataset.repeat().batch(config.batch_size))
    return batches


# --- Model ----------------------------------------------------------------------


class TrainState(train_state.TrainState):
    """Adds the dropout key of the next step."""

    dropout_key: jax.Array


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, both residual."""

    heads: int
    dropout_rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
        """Maps `[batch, length, dim]` to the same shape."""
        dropout = nn.Dropout(self.dropout_rate, deterministic=deterministic)
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(self.heads)(
            y, mask=nn.make_causal_mask(x[..., 0])
        )
        x = x + dropout(y)
        y = nn.LayerNorm()(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(y))
        residual: jax.Array = dropout(nn.Dense(x.shape[-1])(y))
        return x + residual


class Trunk(nn.Module):
    """Computes features of each character from the characters before it."""

    alphabet_size: int
    context: int
    dim: int
    layers: int
    heads: int
    dropout_rate: float

    @nn.compact
    def __call__(self, chars: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Maps characters `[batch, length]` to features `[batch, length, dim]`."""
        positions = jnp.arange(chars.shape[-1])
        x = nn.Embed(self.alphabet_size, self.dim, name="embed")(chars)
        x = x + nn.Embed(self.context, self.dim, name="pos_embed")(positions)
        for i in range(self.layers):
            block = Block(self.heads, self.dropout_rate, name=f"block_{i}")
            x = block(x, deterministic=deterministic)
        features: jax.Array = nn.LayerNorm(name="norm")(x)
        return features


class Transformer(nn.Module):
    """Predicts each character from the characters before it."""

    trunk: Trunk
    alphabet_size: int

    @nn.compact
    def __call__(self, chars: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Maps characters `[batch, length]` to logits `[batch, length, alphabet]`."""
        x = self.trunk(chars, deterministic=deterministic)
        logits: jax.Array = nn.Dense(self.alphabet_size, name="head")(x)
        return logits


def create_trunk(config: ConfigDict, alphabet_size: int) -> Trunk:
    """Returns the part of the model that other models can share."""
    return Trunk(
        alphabet_size=alphabet_size,
        context=config.context,
        dim=config.dim,
        layers=config.layers,
        heads=config.heads,
        dropout_rate=config.dropout_rate,
    )


def create_train_state(
    config: ConfigDict, alphabet_size: int, model: nn.Module | None = None
) -> TrainState:
    """Initializes parameters, optimizer and dropout key from `config.seed`.

    Args:
        config: The settings.
        alphabet_size: The number of characters.
        model: The model; by default a `Transformer`.
    """
    if model is None:
        model = Transformer(create_trunk(config, alphabet_size), alphabet_size)
    learning_rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.total_steps,
    )
    tx = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(learning_rate, weight_decay=config.weight_decay),
    )
    params_key, dropout_key = jax.random.split(jax.random.key(config.seed))
    chars = jnp.zeros((1, config.context), jnp.int32)
    state: TrainState = TrainState.create(  # type: ignore[no-untyped-call]
        apply_fn=model.apply,
        params=model.init(params_key, chars)["params"],
        tx=tx,
        dropout_key=dropout_key,
    )
    return state


# --- Steps ----------------------------------------------------------------------


@functools.partial(jax.jit, donate_argnames="state")
def train_step(state: TrainState, windows: jax.Array) -> tuple[TrainState, jax.Array]:
    """Takes an optimizer step on windows `[batch, context + 1]`.

    Donates `state`: the new state reuses its buffers.
    """
    next_key, dropout_key = jax.random.split(state.dropout_key)

    def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
        logits = state.apply_fn(
            {"params": params},
            windows[:, :-1],
            deterministic=False,
            rngs={"dropout": dropout_key},
        )
        return cross_entropy(logits, windows)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    next_state: TrainState = state.apply_gradients(  # type: ignore[no-untyped-call]
        grads=grads, dropout_key=next_key
    )
    return next_state, loss


@jax.jit
def eval_step(state: TrainState, windows: jax.Array) -> jax.Array:
    """Returns the loss on windows `[batch, context + 1]`, without dropout."""
    logits = state.apply_fn({"params": state.params}, windows[:, :-1])
    return cross_entropy(logits, windows)


def cross_entropy(logits: jax.Array, windows: jax.Array) -> jax.Array:
    """Returns the mean loss of all but the first character, in nats per character."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return jnp.mean(losses)


def evaluate(state: TrainState, corpus: Corpus, config: ConfigDict) -> dict[str, float]:
    """Returns the metrics on the validation windows, the same at every call."""
    windows = corpus.validation[: config.eval_windows]
    loss = float(eval_step(state, windows))
    return {"eval/loss": loss, "eval/bits_per_char": loss / math.log(2)}


@functools.partial(jax.jit, static_argnames="length")
def complete(
    state: TrainState, chars: jax.Array, key: jax.Array, *, length: int
) -> jax.Array:
    """Continues a text from `chars`, as many characters as the model's context.

    Returns:
        The numbers of the next `length` characters, drawn with `key`.
    """

    def write_one(chars: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({"params": state.params}, chars[None])[0, -1]
        char = jax.random.categorical(key, logits / 0.5)  # prefers likely characters
        return jnp.append(chars[1:], char), char

    return jax.lax.scan(write_one, chars, jax.random.split(key, length))[1]


if __name__ == "__main__":
    _CONFIG = config_flags.DEFINE_config_file("config", "configs/char_lm.py")
    _WORKDIR = flags.DEFINE_string("workdir", None, "Replaces config.workdir.")

    def _run(argv: list[str]) -> None:
        del argv
        config = _CONFIG.value
        config.workdir = _WORKDIR.value or config.workdir
        main(config)

    app.run(_run)
