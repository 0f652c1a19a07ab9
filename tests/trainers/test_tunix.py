"""Tunix's PeftTrainer and flaxckpt resume from each other's checkpoints, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import LatestN
from flaxckpt.transforms import use_orbax_names
from tests.trainers.compare import assert_equal

peft_trainer = pytest.importorskip(
    "tunix.sft.peft_trainer", reason="Tunix is not installed"
)

import qwix  # noqa: E402  (Tunix brings it)

pytestmark = pytest.mark.slow

ITEMS = ("model_params", "optimizer_state")
BATCHES = 6


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs, param_dtype=jnp.bfloat16)

    def __call__(self, x):
        return self.last(self.norm(nnx.relu(self.first(x))))


def loss_fn(model, x, y):
    return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)


def lora(model):
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=2.0)
    return qwix.apply_lora_to_model(model, provider, jnp.ones((4, 8)))


def batches(count=BATCHES):
    random = np.random.default_rng(0)
    return [
        {
            "x": random.normal(size=(4, 8)).astype(np.float32),
            "y": random.normal(size=(4, 4)).astype(np.float32),
        }
        for _ in range(count)
    ]


class Trainer(peft_trainer.PeftTrainer):
    def custom_checkpoint_metadata(self):
        return {"global_step": self.train_steps}


def make_trainer(directory, max_steps, *, is_lora=False, accumulation=None):
    """Returns a trainer; it resumes from the newest step of the directory."""
    model = Model(nnx.Rngs(0))
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000,
        max_steps=max_steps,
        gradient_accumulation_steps=accumulation,
        checkpoint_root_directory=None if directory is None else str(directory),
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1),
    )
    rate = optax.warmup_cosine_decay_schedule(0, 0.1, 2, 10)
    trainer = Trainer(lora(model) if is_lora else model, optax.adamw(rate), config)
    return trainer.with_loss_fn(loss_fn)


def trained(directory, max_steps, **options):
    trainer = make_trainer(directory, max_steps, **options)
    trainer.train(batches())
    return trainer


def state_of(trainer, *filters):
    return {
        "model_params": nnx.state(trainer.model, *filters),
        "optimizer_state": nnx.state(trainer.optimizer, nnx.optimizer.OptState),
    }


def open_run(directory, **options):
    """Opens a directory that Tunix reads, too: its variables end with `value`."""
    return flaxckpt.Checkpointer(
        directory, items=ITEMS, transforms=[use_orbax_names()], **options
    )


@pytest.mark.parametrize("accumulation", [None, 2])
def test_flaxckpt_and_tunix_resume_from_each_other(tmp_path, accumulation):
    whole = trained(None, 2 if accumulation else 4, accumulation=accumulation)
    half = 1 if accumulation else 2
    first = trained(tmp_path / "tunix", half, accumulation=accumulation)

    blank = state_of(make_trainer(None, 1, accumulation=accumulation))
    with flaxckpt.Checkpointer(tmp_path / "tunix", read_only=True) as theirs:
        state = theirs.restore(blank)
        assert theirs.restored_step == half
        metadata = theirs.metadata(half).custom
    assert_equal(state, state_of(first))
    assert metadata == {"global_step": half}

    with open_run(tmp_path / "ours") as ours:
        ours.save(half, state, metadata=metadata)
        ours.wait()
        assert_equal(ours.restore(blank), state)

    second = make_trainer(
        tmp_path / "ours", whole.train_steps, accumulation=accumulation
    )
    assert second.train_steps == half
    assert second._restored_custom_metadata == metadata
    assert_equal(state_of(second), state)
    second.train(batches())
    assert_equal(state_of(second), state_of(whole))

    # Steps of both libraries in one directory.
    with open_run(tmp_path / "ours") as ours:
        assert ours.latest_step() == whole.train_steps
        assert_equal(ours.restore(blank), state_of(whole))
        assert_equal(ours.restore(blank, step=half), state)
        ours.save(whole.train_steps + 1, state_of(second)).wait()
    third = make_trainer(tmp_path / "ours", 9, accumulation=accumulation)
    assert third.train_steps == whole.train_steps + 1


def test_resumes_adapters_alone(tmp_path):
    whole = trained(None, 4, is_lora=True)
    first = trained(tmp_path / "tunix", 2, is_lora=True)
    trainer = make_trainer(None, 2, is_lora=True)

    blank = state_of(trainer, nnx.LoRAParam)
    with flaxckpt.Checkpointer(tmp_path / "tunix", read_only=True) as theirs:
        state = theirs.restore(blank)
        held = theirs.metadata(2).leaves
    assert_equal(state, state_of(first, nnx.LoRAParam))
    params = [path for path in held if path.startswith("model_params/")]
    assert params
    assert all("lora" in path for path in params)

    with open_run(tmp_path / "ours") as ours:
        ours.save(2, state).wait()
    second = make_trainer(tmp_path / "ours", 4, is_lora=True)
    second.train(batches())
    assert_equal(state_of(second), state_of(whole))


def test_loads_params_without_optimizer(tmp_path):
    first = trained(tmp_path / "tunix", 2)
    blank = state_of(make_trainer(None, 1))
    params = flaxckpt.load(tmp_path / "tunix", {"model_params": blank["model_params"]})
    assert_equal(params["model_params"], state_of(first)["model_params"])


def test_old_steps_keep_params_without_optimizer(tmp_path):
    first = trained(None, 2)
    state = state_of(first)
    with open_run(
        tmp_path, keep_items={"optimizer_state": [LatestN(1)]}
    ) as checkpointer:
        for step in (2, 3):
            checkpointer.save(step, state).wait()
    assert not (tmp_path / "2" / "optimizer_state").exists()

    # Tunix restores the params of such a step, and starts a new optimizer.
    trainer = make_trainer(None, 4)
    manager = make_trainer(tmp_path, 4).checkpoint_manager
    step, _ = manager.maybe_restore(trainer.model, trainer.optimizer, step=2)
    assert step == 2
    assert_equal(nnx.state(trainer.model), state["model_params"])
    blank = state_of(make_trainer(None, 1))
    with open_run(tmp_path) as checkpointer:
        params = {"model_params": blank["model_params"]}
        assert_equal(
            checkpointer.restore(params, step=2)["model_params"], state["model_params"]
        )
        with pytest.raises(errors.RestoreMismatchError, match="optimizer_state"):
            checkpointer.restore(blank, step=2)


def test_loads_same_values_on_another_mesh(tmp_path):
    first = trained(tmp_path / "tunix", 2)
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P())
    blank = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state_of(make_trainer(None, 1)),
    )
    state = flaxckpt.load(tmp_path / "tunix", blank)
    assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {sharding}
    assert_equal(state, state_of(first))
