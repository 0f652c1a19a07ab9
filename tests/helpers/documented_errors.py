"""Functions that raise the errors of docs/errors.md, in the order of its examples.

Each is called in an empty directory, with pytest's monkeypatch if it asks for it.
"""

import hashlib
import json
import resource
import threading
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt.datasets import StepIndexed
from flaxckpt.transforms import rename
from tests.helpers import seams
from tests.helpers.files import flip_bit
from tests.helpers.gates import Gate

STATE = {"params": {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}, "step": 3}


def train_state(tx):
    return TrainState.create(apply_fn=None, params=STATE["params"], tx=tx)


def make_run(*steps, **options):
    with flaxckpt.Checkpointer("run", **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"w": jnp.full(4, step)})
    return checkpointer


# ---- CheckpointNotFoundError --------------------------------------------------------


def no_such_path():
    flaxckpt.load("rnu")


def no_steps():
    flaxckpt.Checkpointer("run").restore(STATE)


def no_such_step():
    make_run(100, 200)
    flaxckpt.load("run", step=150)


# ---- CheckpointExistsError ----------------------------------------------------------


def path_in_use():
    flaxckpt.save("first", STATE)
    flaxckpt.save("first", STATE)


def files_of_others():
    flaxckpt.save("first", STATE)
    Path("first/notes.txt").write_text("keep me")
    flaxckpt.save("first", STATE, overwrite=True)


def steps_of_an_earlier_run():
    make_run(100, 200)
    with flaxckpt.Checkpointer("run") as checkpointer:
        flaxckpt.CheckpointCallback(checkpointer, every_steps=10)(1, {"w": jnp.ones(4)})


# ---- CheckpointFormatError ----------------------------------------------------------


def not_a_checkpoint():
    Path("papers").mkdir()
    Path("papers/notes.txt").write_text("nothing")
    flaxckpt.load("papers")


def tensorflow():
    Path("tf").mkdir()
    Path("tf/checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"')
    Path("tf/model.ckpt-1.index").write_bytes(b"\0" * 48)
    flaxckpt.load("tf")


def later_version():
    flaxckpt.save("first", STATE)
    manifest = Path("first/flaxckpt.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 9}))
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    marker = {"flaxckpt.json": f"sha256:{digest}"}
    Path("first/commit_success.txt").write_text(json.dumps(marker))
    flaxckpt.load("first")


# ---- DamagedCheckpointError ---------------------------------------------------------


def flipped_bit():
    flaxckpt.save("first", STATE)
    flip_bit(Path("first/state/d/0.small.0"), 1)
    flaxckpt.load("first")


def missing_file():
    flaxckpt.save("first", STATE)
    Path("first/state/d/0.small.0").unlink()
    flaxckpt.load("first")


def not_copied_whole():
    flaxckpt.save("first", STATE)
    Path("first/state/_METADATA").unlink()
    Path("first/flaxckpt.json").unlink()
    flaxckpt.load("first")


def newest_step_is_marked():
    make_run(1, 2)
    flip_bit(Path("run/2/state/d/0.small.0"), 1)
    with flaxckpt.Checkpointer("run") as checkpointer:
        checkpointer.restore()  # of step 1, and step 2 is marked
        checkpointer.restore(fallback=False)


# ---- RestoreMismatchError -----------------------------------------------------------


def leaves_differ():
    flaxckpt.save("first", STATE)
    params = {"w": jnp.ones((4, 3)), "bias": jnp.zeros(2)}
    flaxckpt.load("first", {"params": params, "step": 0})


def renamed_branch():
    flaxckpt.save("first", {"params": {"old": {"w": jnp.ones(3), "b": jnp.ones(2)}}})
    flaxckpt.load("first", {"params": {"new": {"w": jnp.ones(3), "b": jnp.ones(2)}}})


def integers_narrow():
    flaxckpt.save("first", {"ids": np.arange(3, dtype=np.int64)})
    flaxckpt.load("first", {"ids": np.arange(3, dtype=np.int32)})


def several_would_fit():
    flaxckpt.save("first", train_state(optax.chain(optax.trace(0.5), optax.trace(0.9))))
    flaxckpt.load("first", train_state(optax.trace(0.9)))


# ---- ResumeMismatchError ------------------------------------------------------------


def state_elsewhere():
    seen = {"n": 0.0}

    def step(state, batch):
        seen["n"] += 1.0
        return state.apply_gradients(
            grads=jax.tree.map(lambda p: p + seen["n"], state.params)
        )

    with flaxckpt.Checkpointer("run") as checkpointer:
        batches = StepIndexed(lambda i: i)
        on_step = flaxckpt.CheckpointCallback(checkpointer, dataset=batches)
        on_step.check_resume(train_state(optax.sgd(0.1)), step)


# ---- PartitionError -----------------------------------------------------------------


def not_divisible():
    mesh = jax.make_mesh((1,), ("data",))
    rules = [("params/w", P("modle")), ("params/c", P())]
    flaxckpt.abstract_state(STATE, mesh=mesh, leaf_rules=rules)


# ---- UnsupportedLeafError -----------------------------------------------------------


def object_leaf():
    flaxckpt.save("first", {"w": jnp.ones(2), "vocabulary": {"cat", "dog"}})


def function_in_template():
    def gelu(x):
        return x

    flaxckpt.save("first", {"w": jnp.ones(2)})
    flaxckpt.load("first", {"w": jnp.ones(2), "act": gelu})


# ---- LeafNameError ------------------------------------------------------------------


def names_collide():
    flaxckpt.save("first", {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}})


def keys_collide():
    flaxckpt.save("first", {"layers": {1: jnp.ones(2), "1": jnp.zeros(2)}})


# ---- DatasetStateError --------------------------------------------------------------


def generator():
    with flaxckpt.Checkpointer("run") as checkpointer:
        checkpointer.save(1, STATE, dataset=(i for i in range(3)))


def no_dataset_state():
    make_run(1)
    batches = StepIndexed(lambda i: i)
    flaxckpt.Checkpointer("run").restore(
        {"w": jnp.zeros(4, jnp.int32)}, dataset=batches
    )


# ---- OptionError --------------------------------------------------------------------


def no_match():
    flaxckpt.save("first", STATE)
    flaxckpt.load("first", transforms=[rename("parms/(.*)", r"model/\1")])


def module_not_state():
    flaxckpt.save("first", nn.Dense(3))


def another_step():
    with flaxckpt.Checkpointer("run") as checkpointer:
        on_step = flaxckpt.CheckpointCallback(checkpointer, every_steps=1)
        on_step(11, train_state(optax.sgd(0.1)).replace(step=10))


def url_as_path():
    flaxckpt.load(Path("s3://bucket/run"))


# ---- ArgumentError ------------------------------------------------------------------


def argument_of_orbax():
    flaxckpt.Checkpointer("run", max_to_keep=3)


# ---- UnknownNameError ---------------------------------------------------------------


def name_of_orbax():
    flaxckpt.Checkpointer("run").all_steps()


# ---- ReadOnlyError ------------------------------------------------------------------


def reader_writes():
    make_run(1)
    flaxckpt.Checkpointer("run", read_only=True).save(2, STATE)


# ---- SaveFailedError ----------------------------------------------------------------


def full_disk():
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limit[1]))
    try:
        flaxckpt.save("first", {"w": np.ones(2**16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def no_directory():
    Path("run").write_text("a file")
    flaxckpt.Checkpointer("run/7")


# ---- SaveCancelledError -------------------------------------------------------------


def cancelled(monkeypatch):
    gate = Gate(monkeypatch, "chunk")
    handle = gate.hold(lambda: flaxckpt.save_async("first", STATE))
    handle.cancel()
    handle.wait()


# ---- StoreError ---------------------------------------------------------------------


def no_answer():
    options = flaxckpt.StoreOptions(endpoint="http://127.0.0.1:9", retries=0)
    flaxckpt.set_store_options("s3://models", options)
    try:
        flaxckpt.load("s3://models/run")
    finally:
        flaxckpt.set_store_options("s3://models", None)


# ---- CheckpointTimeoutError ---------------------------------------------------------


def still_writing(monkeypatch):
    may_end, publish = threading.Event(), seams.current("rename.publish")

    def publish_later(*args, **options):
        assert may_end.wait(60)
        return publish(*args, **options)

    seams.replace(monkeypatch, "rename.publish", publish_later)
    handle = flaxckpt.save_async("first", STATE)
    try:
        handle.wait(timeout_secs=0)
    finally:
        may_end.set()
        handle.wait()
