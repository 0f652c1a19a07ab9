"""The examples learn, and interrupted runs equal uninterrupted runs."""

import importlib
import importlib.util
import itertools
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flaxckpt
from tests import ROOT
from tests.helpers import programs, slow


class InterruptedTrainingError(Exception):
    """Simulates an interruption of a training run."""


def load(name):
    return (
        importlib.import_module(f"examples.{name}"),
        importlib.import_module(f"configs.{name}"),
    )


def interrupt_after(steps, example, monkeypatch):
    """Interrupts `example` after `steps` training steps; returns the count of steps."""
    train_step, taken = example.train_step, itertools.count()

    def interrupted(*args):
        if next(taken) == steps:
            raise InterruptedTrainingError
        return train_step(*args)

    monkeypatch.setattr(example, "train_step", interrupted)
    return taken


def bits(state):
    """Returns leaf path -> dtype, shape and bytes of a final state."""
    pure = nnx.to_pure_dict(nnx.state(state)) if isinstance(state, tuple) else state
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(pure):
        leaf = jnp.asarray(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found[jax.tree_util.keystr(path)] = array.dtype, array.shape, array.tobytes()
    return found


@pytest.fixture(
    scope="module", params=slow.all_but(["char_lm", "digits_nnx"], ["digits_nnx"])
)
def whole_run(request, tmp_path_factory):
    """An example, its tiny configuration, and the end of an uninterrupted run."""
    example, configs = load(request.param)
    config = configs.tiny()
    config.workdir = str(tmp_path_factory.mktemp("whole"))
    return example, config, *example.main(config)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "found"), [(1, None), (5, 4)])
def test_interrupted_run_matches_uninterrupted_run(
    whole_run, steps, found, tmp_path, monkeypatch, capsys
):
    example, config, whole_state, whole_metrics = whole_run
    config = config.copy_and_resolve_references()
    config.workdir = str(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_after(steps, example, patch)
        with pytest.raises(InterruptedTrainingError):
            example.main(config)
    state, metrics = example.main(config)
    assert (f"found step {found}" in capsys.readouterr().out) == bool(found)
    assert metrics == whole_metrics
    assert bits(state) == bits(whole_state)


def test_restarted_finished_run_takes_no_step(whole_run, monkeypatch):
    example, config, whole_state, whole_metrics = whole_run
    interrupt_after(0, example, monkeypatch)
    state, metrics = example.main(config)
    assert metrics == whole_metrics
    assert bits(state) == bits(whole_state)


@pytest.mark.slow
def test_run_can_be_extended(tmp_path):
    example, configs = load("digits_nnx")
    config = configs.tiny()
    config.workdir = str(tmp_path / "whole")
    whole_state, _ = example.main(config)

    config.workdir = str(tmp_path / "prolonged")
    config.total_steps -= 3
    example.main(config)
    config.total_steps += 3
    state, _ = example.main(config)
    assert bits(state) == bits(whole_state)


@pytest.mark.slow
def test_learns_digits(tmp_path):
    example, configs = load("digits_nnx")
    config = configs.get_config()
    config.workdir = str(tmp_path)
    _, metrics = example.main(config)
    assert metrics["accuracy"] >= 0.97


def test_training_text_hardly_repeats_validation_text():
    example, _ = load("char_lm")
    corpus = example.load_corpus(context=64)

    def text(numbers):
        return "".join(corpus.alphabet[number] for number in numbers)

    train = text(corpus.train[:, 0])
    repeated = [w for w in corpus.validation if text(w) in train]
    assert len(repeated) < len(corpus.validation) / 50


@pytest.fixture(scope="module")
def fine_tuning(tmp_path_factory):
    """The fine-tuning example, its tiny configuration, and its result."""
    example, configs = load("finetune")
    config = configs.tiny()
    config.total_steps = 100  # enough to separate the two losses
    config.workdir = str(tmp_path_factory.mktemp("finetune"))
    return example, config, example.main(config)


@pytest.mark.slow
def test_fine_tuning_beats_training_from_scratch(fine_tuning):
    _, config, losses = fine_tuning
    assert losses["finetuned"] < losses["scratch"] - 0.05
    [origin] = flaxckpt.metadata(Path(config.workdir, "finetuned")).lineage
    assert Path(origin.path) == Path(config.workdir, "model.safetensors")
    assert origin.digest.startswith("sha256:")
    assert not flaxckpt.metadata(Path(config.workdir, "scratch")).lineage


@pytest.mark.slow
def test_fine_tuning_resumes_without_source(fine_tuning, tmp_path, monkeypatch):
    example, config, _ = fine_tuning
    shutil.copytree(config.workdir, tmp_path / "run")
    before = flaxckpt.metadata(tmp_path / "run/finetuned")
    source = tmp_path / "run/model.safetensors"
    source.unlink()
    config = config.copy_and_resolve_references()
    config.total_steps += 2

    topics = example.distinct_topics()
    alphabet = example.alphabet_of([text.lower() for text in topics[::2]])
    extended = alphabet + example.alphabet_of(topics[1::2], without=alphabet)
    corpus = example.corpus_of(topics[1::2], extended, config)
    taken = interrupt_after(None, example, monkeypatch)
    state, _ = example.train(
        example.create_special_state(config, len(extended)),
        corpus,
        config,
        tmp_path / "run/finetuned",
        source=source,
        changes=example.fine_tuning_changes(len(extended)),
    )
    assert next(taken) == 2
    assert int(state.step) == config.total_steps == before.step + 2
    after = flaxckpt.metadata(tmp_path / "run/finetuned")
    assert after.step == config.total_steps
    assert after.lineage == before.lineage


@pytest.mark.slow
def test_demo_finds_equal_runs_on_start_and_resume(tmp_path, capsys):
    demo = importlib.import_module("examples.demo")
    config = load("char_lm")[1].tiny()
    config.update(total_steps=24, eval_every=4, checkpoint={"every_steps": 4})
    demo.main(tmp_path, config)
    first = capsys.readouterr().out
    step = int(re.search(r"SIGKILL in the save of step (\d+)", first)[1])
    assert step in (12, 16, 20, 24), "the first save that was slower than the kill"
    assert f"found step {step - 4}" in first
    assert "Equal in every bit" in first

    demo.main(tmp_path, config)
    second = capsys.readouterr().out
    assert "both runs are finished" in second
    assert "train loss" not in second
    assert "Equal in every bit" in second


@pytest.mark.slow
def test_demo_kills_only_during_saves(tmp_path):
    demo = importlib.import_module("examples.demo")
    for name in (
        *("500", "500.orbax-checkpoint-tmp-deleted-01234567"),
        *("400.orbax-checkpoint-tmp-writing-01234567", "events.jsonl"),
        "500.orbax-checkpoint-tmp-metrics-01234567",
    ):
        (tmp_path / name).mkdir()
    assert demo.unfinished_save(tmp_path, 500) is None
    unfinished = tmp_path / "700.orbax-checkpoint-tmp-writing-01234567"
    unfinished.mkdir()
    assert demo.unfinished_save(tmp_path, 500) == unfinished
    assert demo.saved_step(unfinished) == 700
    assert demo.unfinished_save(tmp_path, 800) is None


@pytest.mark.slow
def test_demo_fails_if_runs_differ(tmp_path, capsys):
    demo = importlib.import_module("examples.demo")
    example, configs = load("digits_nnx")
    for seed, name in enumerate(["killed", "twin"]):
        config = configs.tiny()
        config.update(seed=seed, workdir=str(tmp_path / name))
        example.main(config)
    with pytest.raises(SystemExit, match="the runs differ in"):
        demo.compare(tmp_path / "killed", tmp_path / "twin")
    assert "leaves differ" in capsys.readouterr().out


def run_example(name, path):
    """Runs an example as a program; returns what it has printed."""
    options = {"cwd": ROOT, "timeout": None, "HF_HUB_OFFLINE": "1"}
    return programs.run("-m", f"examples.{name}", path, **options).stdout


@pytest.mark.slow
@pytest.mark.multiprocess
def test_four_processes_resume_run_of_two(tmp_path):
    printed = run_example("multiprocess", tmp_path / "run")
    assert "2 processes begin at step 0\n" in printed
    assert "a process ended with -9" in printed
    assert "4 processes begin at step 8\n" in printed
    assert "step 20 is saved" in printed
    assert "run/20 is good" in printed


@pytest.mark.slow
@pytest.mark.multiprocess
def test_three_processes_continue_without_fourth_machine(tmp_path):
    printed = run_example("lost_machine", tmp_path)
    assert "4 processes begin at step 0\n" in printed
    assert "3 processes begin at step 3\n" in printed
    assert printed.count(": 0 bytes from afar") == 3
    digests = re.findall("has the digest ([0-9a-f]{64})", printed)
    assert len(digests) == 2
    assert len({*digests}) == 1
    assert "run/6 is good" in printed


@pytest.mark.slow
def test_trains_and_exports_hugging_face_model_on_eight_devices(tmp_path):
    printed = run_example("finetune_huggingface", tmp_path)
    assert "sharded: P(None, 'model') over {'data': 2, 'model': 4}" in printed
    losses = dict(re.findall(r"(first|last) loss: ([\d.]+)", printed))
    assert float(losses["last"]) < float(losses["first"]) / 2
    assert "the exported arrays are those of the run" in printed
    is_installed = all(map(importlib.util.find_spec, ("torch", "transformers")))
    assert ("logits of transformers differ by at most" in printed) == is_installed
    [origin] = flaxckpt.metadata(tmp_path / "run").lineage
    assert origin.path == str(tmp_path / "published")
    assert flaxckpt.Checkpointer(tmp_path / "run").steps() == [10, 20]
    again = run_example("finetune_huggingface", tmp_path)  # it exports once more
    assert "loss" not in again
    assert "the exported arrays are those of the run" in again
