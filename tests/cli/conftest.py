"""Checkpoints of several formats, and the command line."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from click.testing import CliRunner
from flax import serialization
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt.cli import app


def train_state(step=0):
    params = {"dense": {"kernel": jnp.full((4, 3), step + 0.5), "bias": jnp.zeros(3)}}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    return state.replace(step=step)


def make_all(root):
    """Creates a run of flaxckpt, a run of Orbax, and single files of other formats."""
    losses = {100: 3.0, 200: 1.0, 300: 2.0}
    with flaxckpt.Checkpointer(root / "run") as run:
        for step, loss in losses.items():
            run.save(step, train_state(step), metrics={"loss": loss})
        run.wait()
    options = ocp.CheckpointManagerOptions(
        step_prefix="step", best_fn=lambda metrics: metrics["loss"], best_mode="min"
    )
    with ocp.CheckpointManager(root / "orbax", options=options) as manager:
        for step in (1, 2):
            saved = ocp.args.StandardSave({"w": np.full((2, 3), step, np.float32)})
            manager.save(step, args=saved, metrics={"loss": float(step)})
    values = {"w": np.full((2, 3), 2, np.float32)}
    safetensors.numpy.save_file(values, root / "w.safetensors")
    (root / "w.msgpack").write_bytes(serialization.to_bytes(values))
    (root / "empty").mkdir()
    (root / "notes.txt").write_text("no checkpoint\n")


@pytest.fixture(scope="session")
def _made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    make_all(root)
    return root


@pytest.fixture
def here(_made, tmp_path, monkeypatch):
    """A copy of all checkpoints for each test."""
    shutil.copytree(_made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Command:
    """Runs the command in this process."""

    def __call__(self, *args, code=0):
        result = CliRunner().invoke(app, [*map(str, args)], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    def text(self, *args, code=0):
        """Returns the lines of its text output."""
        return self(*args, code=code).stdout.splitlines()

    def json(self, *args, code=0):
        """Returns its JSON document."""
        return json.loads(
            self(*args, "--json", code=code).stdout, parse_constant=refuse_constant
        )

    def refuses(self, *args, code=2):
        """Returns its stderr; stdout must be empty."""
        result = self(*args, code=code)
        assert not result.stdout
        return result.stderr


def refuse_constant(constant):
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture
def command():
    return Command()
