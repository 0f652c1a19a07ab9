"""MaxDiffusion's items, saved and restored by Orbax as MaxDiffusion calls it.

MaxDiffusion is in no package index. Its checkpointers save states as trees, and
configurations as JSON items. Source: `src/maxdiffusion/checkpointing` of
AI-Hypercomputer/maxdiffusion at 7cfb880, August 2026.
"""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

import flaxckpt
from tests.trainers.compare import assert_equal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
]

FLUX_STATES = ("flux_state", "vae_state", "scheduler")
FLUX_CONFIGS = {
    "flux_config": {"num_layers": 2, "axes_dims_rope": [16, 56], "guidance": True},
    "vae_config": {"scaling_factor": 0.3611, "latent_channels": 16},
    "scheduler_config": {"shift": 3.0, "prediction_type": None},
}
DIFFUSION_STATES = ("unet_state", "vae_state", "text_encoder_state")
DIFFUSION_CONFIGS = {
    "unet_config": {"sample_size": 64},
    "vae_config": {"block_out_channels": [128, 256]},
    "text_encoder_config": {"hidden_size": 8},
    "scheduler_config": {"beta_start": 0.00085},
    "tokenizer_config": {"path": "tokenizer"},
}
WAN_STATES = ("low_noise_transformer_state", "high_noise_transformer_state")
WAN_CONFIGS = {"wan_config": {"num_layers": 2}}

KINDS = {
    "flux": (FLUX_STATES, FLUX_CONFIGS, ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
    "stable diffusion": (
        DIFFUSION_STATES,
        DIFFUSION_CONFIGS,
        ocp.args.PyTreeSave,
        ocp.args.PyTreeRestore,
    ),
    "wan": (WAN_STATES, WAN_CONFIGS, ocp.args.StandardSave, ocp.args.StandardRestore),
}


def make_params(seed):
    return {
        "attention": {"kernel": jax.random.normal(jax.random.key(seed), (8, 4))},
        "norm": {"scale": jnp.ones(4, jnp.bfloat16)},
    }


def make_states(names):
    """Returns a state for each name, the first with its optimizer, as they train it."""
    params, *others = map(make_params, range(len(names)))
    first = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))
    first = first.apply_gradients(grads=params)
    frozen = [{"step": jnp.int32(0), "params": params} for params in others]
    return dict(zip(names, [first.replace(step=jnp.int32(1)), *frozen], strict=True))


def make_batches():
    return iter(grain.MapDataset.range(20).shuffle(seed=1).to_iter_dataset())


def manager(directory, names):
    return ocp.CheckpointManager(
        directory,
        item_names=(*names, "iter"),
        options=ocp.CheckpointManagerOptions(create=True, save_interval_steps=1),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_run_continues_exactly_in_both_directions(tmp_path, kind):
    names, configs, save_args, restore_args = KINDS[kind]
    states, batches = make_states(names), make_batches()
    for _ in range(3):
        next(batches)
    with manager(tmp_path / "theirs", (*names, *configs)) as theirs:
        items = {name: save_args(state) for name, state in states.items()}
        items |= {name: ocp.args.JsonSave(config) for name, config in configs.items()}
        items["iter"] = grain.checkpoint.CheckpointSave(batches)
        theirs.save(3, args=ocp.args.Composite(**items))

    moved = make_batches()
    blank = jax.tree.map(jnp.zeros_like, states)
    with flaxckpt.Checkpointer(
        tmp_path / "theirs", items=names, dataset_item="iter"
    ) as checkpointer:
        found = checkpointer.restore(blank, dataset=moved)
        texts = checkpointer.metadata(3).json
    assert_equal(found, states)
    assert texts == configs
    assert moved.get_state() == batches.get_state()

    with flaxckpt.Checkpointer(
        tmp_path / "ours", items=names, dataset_item="iter"
    ) as checkpointer:
        checkpointer.save(3, found, dataset=moved, json=texts)
    again = make_batches()
    with manager(tmp_path / "ours", (*names, *configs)) as theirs:
        args = {name: restore_args(blank[name]) for name in names}
        args |= {name: ocp.args.JsonRestore() for name in configs}
        args["iter"] = grain.checkpoint.CheckpointRestore(again)
        restored = theirs.restore(3, args=ocp.args.Composite(**args))
    for name in names:
        assert_equal(restored[name], states[name])
    assert {name: restored[name] for name in configs} == configs
    assert next(again) == next(batches)


def test_maxdiffusion_loads_params_of_item_alone(tmp_path):
    """As `load_params_from_path` does: the item's path, and transforms of Orbax."""
    states = make_states(FLUX_STATES)
    with flaxckpt.Checkpointer(tmp_path, items=FLUX_STATES) as checkpointer:
        checkpointer.save(3, states, json=FLUX_CONFIGS)
    params = states["flux_state"].params
    with ocp.PyTreeCheckpointer() as theirs:
        restored = theirs.restore(
            tmp_path / "3" / "flux_state",
            item={"params": params},
            transforms={},
            restore_args={
                "params": ocp.checkpoint_utils.construct_restore_args(params)
            },
        )
    assert_equal(restored["params"], params)


def test_loads_one_state_without_others(tmp_path):
    states = make_states(FLUX_STATES)
    with flaxckpt.Checkpointer(tmp_path, items=FLUX_STATES) as checkpointer:
        checkpointer.save(3, states, json=FLUX_CONFIGS)
    found = flaxckpt.load(tmp_path, {"vae_state": states["vae_state"]})
    assert_equal(found["vae_state"], states["vae_state"])
    assert np.shape(found["vae_state"]["params"]["norm"]["scale"]) == (4,)
