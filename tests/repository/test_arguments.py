"""Plausible mistakes in a call raise an error at the call, which names the argument.

Each row is a mistake, and what its error must say. None may be an error of Python from
deep inside, print the values of a state, or be longer than a screen.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import CheckpointCallback, Checkpointer, configs, errors, formats
from flaxckpt import datasets as ds
from flaxckpt import policies as po
from flaxckpt import transforms as tf
from tests.transforms.cases import MISTAKES

NAN = float("nan")


def create() -> TrainState:
    params = {"w": jnp.arange(64.0).reshape(8, 8), "b": jnp.zeros(8)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


STATE = create()
"""Has values that no message may contain."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with a checkpoint `one` and a run `run`."""
    root = tmp_path_factory.mktemp("arguments")
    flaxckpt.save(root / "one", {"w": np.ones((2, 3), np.float32)})
    with Checkpointer(root / "run") as run:
        run.save(1, STATE, metrics={"loss": 1.0})
    return root


@pytest.fixture
def here(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def told(call: Callable[[], Any]) -> str:
    """Returns the error message of a call, which must be short and from flaxckpt."""
    with pytest.raises(errors.CheckpointError) as caught:
        call()
    text = str(caught.value)
    assert text.count("\n") < 15
    assert len(text) < 1200
    assert "Array(" not in text
    assert "array([" not in text
    assert not re.search(r"\b_[A-Z]\w+", text), "a private class"
    return text


def mistakes(**rows: tuple[Callable[..., Any], str]) -> Any:
    return pytest.mark.parametrize(
        ("call", "says"), list(rows.values()), ids=list(rows)
    )


@pytest.mark.parametrize(
    "path",
    [STATE, {"a": 1}, None, 3, b"one", ["one"], jnp.ones(3), create],
    ids=lambda v: type(v).__name__,
)
def test_functions_name_the_type_of_an_invalid_path(here, path):
    for call in (
        lambda: flaxckpt.save(path, "x"),
        lambda: flaxckpt.save_async(path, "x"),
        lambda: flaxckpt.load(path, "one"),
        lambda: flaxckpt.plan(path, STATE),
        lambda: flaxckpt.metadata(path),
        lambda: flaxckpt.open_leaf(path, "w"),
        lambda: flaxckpt.verify(path),
        lambda: flaxckpt.diff("one", path),
        lambda: flaxckpt.convert(path, "two"),
        lambda: flaxckpt.convert("one", path),
        lambda: Checkpointer(path),
        lambda: tf.merge(path),
        lambda: formats.detect(path),
    ):
        assert told(call).startswith("wanted a path, as a str or a pathlib.Path, found")


@mistakes(
    empty_path=(lambda: flaxckpt.load(""), "use '.' for the current directory"),
    a_function_for_a_state=(lambda: flaxckpt.save("x", create), "the function create"),
    a_class_for_a_state=(lambda: flaxckpt.save("x", TrainState), "class TrainState"),
    a_function_to_load=(lambda: flaxckpt.load("one", create), "jax.eval_shape of it"),
    a_type_for_a_leaf=(
        lambda: flaxckpt.load("one", {"w": jnp.float32}),
        "w: found the class float32",
    ),
    a_text_for_a_state=(lambda: flaxckpt.load("one", "w"), "wanted a state"),
    a_leaf_path_of_none=(lambda: flaxckpt.open_leaf("one", None), "must be a string"),
    a_list_for_a_leaf_path=(lambda: flaxckpt.open_leaf("one", ["w"]), "got a list"),
    a_class_for_types=(
        lambda: flaxckpt.load("one", types=TrainState),
        "types must be a list of classes, got the class TrainState",
    ),
    a_text_for_types=(lambda: flaxckpt.load("one", types="T"), "must be a list of"),
    a_state_in_types=(
        lambda: flaxckpt.load("one", types=[STATE]),
        "contains a TrainState",
    ),
    an_optimizer=(
        lambda: flaxckpt.load("run", STATE, optimizer=optax.adam(1e-3)),
        "('match', 'exact', 'reinit'), got a GradientTransformationExtraArgs",
    ),
    a_text_to_wait=(
        lambda: flaxckpt.save_async("w1", STATE).wait(timeout_secs="1"),
        "timeout_secs must be a number, got '1'",
    ),
    nan_to_wait=(
        lambda: flaxckpt.save_async("w2", STATE).wait(timeout_secs=NAN),
        "timeout_secs must be a number, got nan",
    ),
)
def test_rejects_invalid_states_leaves_and_times(here, call, says):
    assert says in told(call)


@pytest.mark.parametrize("layout", [{"store": "files"}, "files", flaxckpt.ArrayLayout])
def test_rejects_invalid_layout_everywhere(here, layout):
    for call in (
        lambda: flaxckpt.save("x", STATE, layout=layout),
        lambda: flaxckpt.save_async("x", STATE, layout=layout),
        lambda: flaxckpt.convert("one", "x", layout=layout),
        lambda: flaxckpt.parameter_infos(STATE, layout=layout),
        lambda: flaxckpt.simulate(STATE, processes=2, layout=layout),
        lambda: Checkpointer("x", layout=layout),
    ):
        assert "layout must be a flaxckpt.ArrayLayout, got" in told(call)
    assert not (here / "x").exists()


@pytest.mark.parametrize(
    ("transforms", "says"),
    [
        (tf.drop("w"), "must be a list of transforms, got drop('w')"),
        ("bfloat16", "must be a list of transforms, got 'bfloat16'"),
        ({"a": "b"}, "must be a list of transforms, got a dict"),
        (None, "must be a list of transforms, got None"),
        ([tf.drop], "call it, as in transforms=[drop(…)]"),
        ([tf.inverse], "call it, as in transforms=[inverse(…)]"),
        ([jnp.bfloat16], "contains the class bfloat16"),
        ([("a", "b")], "contains a tuple"),
        ([[tf.rename("a", "b")]], "contains a list"),
        ([None], "contains None"),
    ],
)
def test_rejects_invalid_transforms_everywhere(here, transforms, says):
    for call in (
        lambda: flaxckpt.save("x", STATE, transforms=transforms),
        lambda: flaxckpt.load("one", transforms=transforms),
        lambda: flaxckpt.plan("one", STATE, transforms=transforms),
        lambda: flaxckpt.diff("one", "run", transforms=transforms),
        lambda: flaxckpt.convert("one", "x", transforms=transforms),
        lambda: Checkpointer("x", transforms=transforms),
        lambda: tf.merge("one", transforms=transforms),
        lambda: tf.inverse(transforms),
    ):
        assert says in told(call)


@mistakes(
    text_for_bytes=(
        lambda: Checkpointer("n", max_concurrent_bytes="2GB"),
        "max_concurrent_bytes must be a number, got '2GB'",
    ),
    nan_for_bytes=(lambda: Checkpointer("n", max_concurrent_bytes=NAN), "got nan"),
    none_for_secs=(lambda: Checkpointer("n", peer_timeout_secs=None), "got None"),
    number_for_format=(lambda: Checkpointer("n", step_format=8), "a string such as"),
    bare_sink=(lambda: Checkpointer("n", sinks=print), "sinks must be a list, got the"),
    no_sinks=(lambda: Checkpointer("n", sinks=None), "sinks must be a list, got None"),
    number_for_staging=(
        lambda: Checkpointer("n", staging=3),
        "staging must be a directory",
    ),
    a_policy_class=(
        lambda: Checkpointer("n", keep=[po.LatestN]),
        "contains the class LatestN instead of an instance",
    ),
)
def test_rejects_invalid_checkpointer_options(here, call, says):
    assert says in told(call)
    assert not (here / "n").exists()


@mistakes(
    swapped=(lambda c: c.add_metrics({"loss": 1.0}, 1), "a step is the number"),
    list_of_steps=(lambda c: c.delete([1]), "a step is the number"),
    text_for_a_step=(lambda c: c.metadata("1"), "a step is the number"),
    text_to_follow=(lambda c: [*c.new_steps(timeout_secs="1")], "must be a number"),
    nan_to_follow=(lambda c: [*c.new_steps(timeout_secs=NAN)], "got nan"),
    less_than_nothing=(lambda c: [*c.new_steps(timeout_secs=-1)], "must be 0 or more"),
    a_negative_pause=(
        lambda c: [*c.new_steps(timeout_secs=0.1, poll_secs=-1)],
        "poll_secs must be 0 or more, got -1",
    ),
)
def test_checkpointer_methods_reject_invalid_arguments(here, call, says):
    with Checkpointer("run") as run:
        assert says in told(lambda: call(run))


@mistakes(
    secs=(lambda c: CheckpointCallback(c, every_secs="60"), "every_secs must be a num"),
    steps=(lambda c: CheckpointCallback(c, on_steps=3), "on_steps must be a list of"),
    grace=(
        lambda c: CheckpointCallback(c, every_steps=1, grace_secs="x"),
        "grace_secs must be a number, got 'x'",
    ),
    exit_code=(
        lambda c: CheckpointCallback(c, every_steps=1, exit_code="x"),
        "exit_code must be a whole number, got 'x'",
    ),
    large_exit_code=(
        lambda c: CheckpointCallback(c, every_steps=1, exit_code=999),
        "exit_code must be None or from 0 to 255, got 999",
    ),
    sinks=(
        lambda c: CheckpointCallback(c, every_steps=1, sinks=print),
        "sinks must be a list, got the function print",
    ),
    clock=(
        lambda c: CheckpointCallback(c, every_steps=1, clock=3),
        "clock must be a function that returns seconds, got 3",
    ),
    pickled=(
        lambda c: pickle.dumps(CheckpointCallback(c, every_steps=1)),
        "a Checkpointer cannot be pickled or copied",
    ),
    copied=(copy.deepcopy, "pass its directory"),
    step_fn=(
        lambda c: CheckpointCallback(c, every_steps=1).check_resume(STATE, 3),
        "step_fn must be a function of a state and a batch, got 3",
    ),
)
def test_rejects_invalid_callback_options(here, call, says):
    with Checkpointer("run") as run:
        assert says in told(lambda: call(run))


MESH = jax.make_mesh((1,), ("x",))


@mistakes(
    mesh_by_place=(lambda: flaxckpt.abstract_state(STATE, MESH), "by name: mesh=mesh"),
    mesh_of_a_function=(lambda: flaxckpt.abstract_state(create, MESH), "by name"),
    arguments=(lambda: flaxckpt.abstract_state(STATE, 1), "a TrainState takes no arg"),
    no_mesh=(lambda: flaxckpt.abstract_state(STATE, mesh=4), "got 4: jax.make_mesh"),
    axes=(lambda: flaxckpt.abstract_state(STATE, mesh=("x",)), "got a tuple"),
    bucket=(
        lambda: flaxckpt.set_store_options(flaxckpt.StoreOptions(), "s3://b"),
        "found a StoreOptions; it comes before the options",
    ),
    dict_of_options=(
        lambda: flaxckpt.set_store_options("s3://b", {"region": "x"}),
        "options must be a flaxckpt.StoreOptions or None, got a dict",
    ),
    deadline=(lambda: flaxckpt.StoreOptions(deadline_secs="60"), "got '60'"),
    retries=(lambda: flaxckpt.StoreOptions(retries=1.5), "retries must be a whole"),
    endpoint=(lambda: flaxckpt.StoreOptions(endpoint=3), "endpoint must be a string"),
    chunk_text=(lambda: flaxckpt.ArrayLayout(chunk_bytes="64MB"), "got '64MB'"),
    chunk_float=(lambda: flaxckpt.ArrayLayout(chunk_bytes=1.5), "whole number of at"),
    chunk_nan=(lambda: flaxckpt.ArrayLayout(chunk_bytes=NAN), "got nan"),
    axis_text=(lambda: flaxckpt.ArrayLayout(shard_axes="0"), "shard_axes must be"),
    axis_float=(lambda: flaxckpt.ArrayLayout(shard_axes=(0.5,)), "got 0.5"),
    axis_bool=(lambda: flaxckpt.ArrayLayout(shard_axes=True), "got True"),
    by_place=(lambda: flaxckpt.ArrayLayout("files"), "chunk_bytes must be a whole"),
)
def test_rejects_invalid_layout_mesh_and_store_options(call, says):
    assert says in told(call)


@pytest.mark.parametrize(("call", "says"), MISTAKES)
def test_rejects_invalid_transform_arguments(call, says):
    assert says in told(call)


@pytest.mark.parametrize("made_of", [None, 3, jnp.ones(3)])
def test_from_function_must_return_tree(here, made_of):
    change = tf.from_function(lambda tree: made_of)
    says = told(lambda: flaxckpt.load("one", transforms=[change]))
    assert "must return the state as nested dicts, got" in says


@mistakes(
    bare_policy=(lambda: po.decide(po.LatestN(1), []), "policies must be a list of"),
    class_policy=(
        lambda: po.decide([po.LatestN], []),
        "contains the class LatestN instead",
    ),
    number_policy=(lambda: po.decide([3], []), "policies must be a list of policies"),
    no_checkpoints=(lambda: po.decide([], 3), "checkpoints must be a list of"),
    numbers=(
        lambda: po.decide([], [1, 2]),
        "checkpoints must be a list of objects with",
    ),
    no_function=(lambda: ds.StepIndexed([1, 2]), "StepIndexed needs a function"),
    start_text=(lambda: ds.StepIndexed(lambda i: i, start="0"), "start must be a who"),
    start_less=(lambda: ds.StepIndexed(lambda i: i, start=-1), "of at least 0, got -1"),
    no_transform=(
        lambda: ds.Buffered(ds.StepIndexed(lambda i: i), transform=3),
        "transform must be a function of a batch, got 3",
    ),
    config=(
        lambda: configs.CheckpointConfig(directory="r", keep=[po.LatestN]),
        "keep[0] must be a policy, found the class LatestN",
    ),
)
def test_rejects_invalid_policies_datasets_and_configs(call, says):
    assert says in told(call)


def test_functions_accept_valid_arguments():
    flaxckpt.ArrayLayout(chunk_bytes=np.int64(2**20))
    flaxckpt.StoreOptions(deadline_secs=np.float32(0.5), retries=0)
    tf.cast("w", np.float32)
    tf.cast("w", jnp.dtype("bfloat16"))
    tf.pad("w", np.array([5, 6]))
    tf.pad("w", (None, 6), value=np.float32(1))
    tf.transpose("w", (-1, 0))
    tf.assign({"a": None})
    tf.assign([["a", "b"]])
    tf.rename({"a": "b"})
    po.decide(iter([po.LatestN(1)]), [])
    assert [*ds.StepIndexed(lambda i: i, start=np.int64(3)).get_state().values()] == [3]
    assert flaxckpt.abstract_state(lambda n: jnp.ones(n), 3).shape == (3,)


SEEN: list[flaxckpt.Event] = []


class Pair(NamedTuple):
    w: Any


def saved_leaves(path: Path, transforms: Any) -> Any:
    flaxckpt.save(path, {"w": 1}, transforms=transforms)
    return list(flaxckpt.metadata(path).leaves)


def converted_leaves(path: Path, transforms: Any) -> Any:
    flaxckpt.convert("one", path, transforms=transforms)
    return list(flaxckpt.metadata(path).leaves)


def mapped_leaves(path: Path, transforms: Any) -> Any:
    on_step = CheckpointCallback(Checkpointer(path), on_preemption=False)
    state = {"v": np.zeros((2, 3), np.float32)}
    return on_step.restore_or_init(state, source="one", source_map=transforms)[0].keys()


def class_of_loaded(path: Path, types: Any) -> Any:
    flaxckpt.save(path, Pair(1))
    return type(flaxckpt.load(path, types=types))


def commits(path: Path, sinks: Any) -> Any:
    with Checkpointer(path, sinks=sinks) as run:
        run.save(1, {"w": 1})
    return [event.step for event in SEEN if event.kind == "committed"]


def saved_steps(path: Path, on_steps: Any) -> Any:
    with Checkpointer(path) as run:
        on_step = CheckpointCallback(run, on_steps=on_steps, save_last=False)
        for step in range(1, 4):
            on_step(step, {"w": 1})
        return run.steps()


@pytest.mark.parametrize(
    ("result", "values", "wanted"),
    [
        (saved_leaves, [tf.rename("w", "v")], ["v"]),
        (converted_leaves, [tf.rename("w", "v")], ["v"]),
        (mapped_leaves, [tf.rename("w", "v")], {"v"}),
        (class_of_loaded, [Pair], Pair),
        (commits, [SEEN.append], [1]),
        (saved_steps, [3, 1], [1, 3]),
    ],
)
def test_generator_counts_as_list(here, tmp_path, result, values, wanted):
    assert result(tmp_path / "a", iter(values)) == wanted
