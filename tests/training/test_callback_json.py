"""A callback saves JSON items with every step."""

import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from orbax import checkpoint as ocp

import flaxckpt
from flaxckpt import errors

CONFIG = {"model": {"layers": 2, "names": ["a", None]}}
STATES = {
    "dict": lambda step: {"w": np.arange(3.0) + step},
    "list": lambda step: [jnp.full(2, step), {"n": step}],
}
states = pytest.mark.parametrize("create", STATES.values(), ids=STATES)


@states
def test_saves_json_with_every_step(tmp_path, create):
    with (
        flaxckpt.Checkpointer(tmp_path) as ckpt,
        flaxckpt.CheckpointCallback(ckpt, every_steps=2, json=CONFIG) as on_step,
    ):
        for step in range(1, 6):
            on_step(step, create(step))
    assert ckpt.steps() == [2, 4, 5]  # at the end, too
    for step in ckpt.steps():
        assert ckpt.metadata(step).json == CONFIG
        assert ckpt.verify(step).ok
    with ocp.CheckpointManager(tmp_path, item_names=("state", "model")) as manager:
        args = ocp.args.Composite(model=ocp.args.JsonRestore())
        assert manager.restore(4, args=args)["model"] == CONFIG["model"]


@states
def test_accepts_json_as_function_of_completed_steps(tmp_path, create):
    with (
        flaxckpt.Checkpointer(tmp_path) as ckpt,
        flaxckpt.CheckpointCallback(
            ckpt,
            every_steps=2,
            step_is="index",
            json=lambda step: {"progress": {"step": step}} if step > 2 else {},
        ) as on_step,
    ):
        for step in range(5):
            on_step(step, create(step))
    found = {step: ckpt.metadata(step).json for step in ckpt.steps()}
    assert found == {2: {}, 4: {"progress": {"step": 4}}, 5: {"progress": {"step": 5}}}


def test_last_save_before_exit_includes_json(tmp_path):
    with (
        flaxckpt.Checkpointer(tmp_path) as ckpt,
        flaxckpt.CheckpointCallback(ckpt, json=CONFIG) as on_step,
    ):
        on_step(1, {"n": 1})
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            on_step(2, {"n": 2})
    assert ckpt.metadata(2).json == CONFIG


@pytest.mark.parametrize(
    ("json", "wanted"),
    [
        ({"state": {}}, "the name is also in items"),
        ({"config": {"a": {1}}}, "cannot be saved as JSON"),
        (lambda step: {"a/b": step}, "wanted the name of a directory"),
        (lambda step: step, "json is a int"),
    ],
    ids=["name", "value", "function", "number"],
)
def test_first_call_rejects_invalid_json(tmp_path, json, wanted):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=100, json=json)
        with pytest.raises(errors.OptionError, match=wanted):
            on_step(1, {"n": 1})
        on_step.abandon(ValueError())
    assert ckpt.steps() == []


@pytest.mark.parametrize("json", ["text", 3, [CONFIG]], ids=str)
def test_constructor_rejects_json_other_than_dict(tmp_path, json):
    with (
        flaxckpt.Checkpointer(tmp_path) as ckpt,
        pytest.raises(errors.OptionError, match="json must be a dict"),
    ):
        flaxckpt.CheckpointCallback(ckpt, json=json)
