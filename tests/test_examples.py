"""The examples learn, and a run that was interrupted ends as if it never was."""

import importlib
import itertools

import jax
import numpy as np
import pytest
from flax import nnx

EXAMPLES = ["char_lm", "digits_nnx"]


class Interrupted(Exception):
    """Stands for whatever stops a training run."""


def load(name):
    return (
        importlib.import_module(f"examples.{name}"),
        importlib.import_module(f"configs.{name}"),
    )


def interrupt_after(steps, example, monkeypatch):
    """Lets `example` take `steps` training steps, and no more."""
    train_step, taken = example.train_step, itertools.count()

    def interrupted(*args):
        if next(taken) == steps:
            raise Interrupted
        return train_step(*args)

    monkeypatch.setattr(example, "train_step", interrupted)


def bits(state):
    """Leaf path -> dtype, shape and bytes of everything in a final state."""
    pure = nnx.to_pure_dict(nnx.state(state)) if isinstance(state, tuple) else state
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(pure):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found[jax.tree_util.keystr(path)] = array.dtype, array.shape, array.tobytes()
    return found


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    name, steps, tmp_path, monkeypatch
):
    example, configs = load(name)
    config = configs.tiny()
    config.workdir = str(tmp_path / "twin")
    twin_state, twin_metrics = example.main(config)

    config.workdir = str(tmp_path / "interrupted")
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(steps, example, patch)
        example.main(config)
    state, metrics = example.main(config)

    assert metrics == twin_metrics
    assert bits(state) == bits(twin_state)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_finished_run_started_again_takes_no_step(name, tmp_path, monkeypatch):
    example, configs = load(name)
    config = configs.tiny()
    config.workdir = str(tmp_path)
    state, metrics = example.main(config)
    interrupt_after(0, example, monkeypatch)
    same_state, same_metrics = example.main(config)
    assert same_metrics == metrics
    assert bits(same_state) == bits(state)


def test_a_run_can_be_prolonged(tmp_path):
    example, configs = load("digits_nnx")
    config = configs.tiny()
    config.workdir = str(tmp_path / "twin")
    twin_state, _ = example.main(config)

    config.workdir = str(tmp_path / "prolonged")
    config.total_steps -= 3
    example.main(config)
    config.total_steps += 3
    state, _ = example.main(config)
    assert bits(state) == bits(twin_state)


def test_the_digits_are_learned(tmp_path):
    example, configs = load("digits_nnx")
    config = configs.get_config()
    config.workdir = str(tmp_path)
    _, metrics = example.main(config)
    assert metrics["accuracy"] >= 0.97


def test_no_training_topic_repeats_a_validation_topic():
    example, _ = load("char_lm")
    corpus = example.load_corpus(context=64)

    def text(numbers):
        return "".join(corpus.alphabet[number] for number in numbers)

    train = text(corpus.train[:, 0])
    repeated = [w for w in corpus.validation if text(w) in train]
    assert len(repeated) < len(corpus.validation) / 50
