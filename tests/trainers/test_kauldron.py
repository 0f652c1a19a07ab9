"""Kauldron's trainer and flaxckpt resume from each other's checkpoints, exactly."""

import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxckpt
from tests.trainers.compare import assert_equal

pytest.importorskip("kauldron", reason="Kauldron is not installed")

from kauldron import kd

pytestmark = pytest.mark.slow

ITEMS = {"step_format": "ckpt_{step}", "items": "default", "dataset_item": "ds_iter"}


class Images:
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"image": np.random.default_rng(i).random((4, 4, 1), np.float32)}

    def __repr__(self):  # is part of the iterator's state
        return "Images()"


def make_trainer(workdir, steps, *, is_saved=True):
    return kd.train.Trainer(
        workdir=str(workdir),
        seed=42,
        num_train_steps=steps,
        train_ds=kd.data.py.DataSource(
            Images(), shuffle=True, num_epochs=None, batch_size=8, num_workers=0
        ),
        model=kd.nn.FlatAutoencoder(
            inputs="batch.image", encoder=nn.Dense(3), decoder=nn.Dense(16)
        ),
        train_losses={
            "recon": kd.losses.L2(preds="preds.image", targets="batch.image")
        },
        optimizer=optax.adam(3e-3),
        schedules={},
        checkpointer=(
            kd.ckpts.Checkpointer(workdir=str(workdir), save_interval_steps=2)
            if is_saved
            else kd.ckpts.NoopCheckpointer()
        ),
    )


def trained(workdir, steps, **options):
    """Returns the state after training; Kauldron runs one step more than `steps`."""
    return make_trainer(workdir, steps, **options).train()[0]


def test_run_continues_exactly_in_both_directions(tmp_path):
    whole = trained(tmp_path / "whole", 6, is_saved=False)
    trained(tmp_path / "theirs", 4)
    at_step = trained(tmp_path / "part", 3, is_saved=False)  # step 4 has 4 updates

    trainer = make_trainer(tmp_path / "ours", 6)
    batches = iter(trainer.train_ds)
    with flaxckpt.Checkpointer(tmp_path / "theirs/checkpoints", **ITEMS) as theirs:
        assert theirs.steps() == [0, 2, 4]
        state = theirs.restore(trainer.init_state(), dataset=batches.iter)
        timer = theirs.metadata(4).json["timer"]
    assert_equal(state, at_step)
    assert state.step == 4
    assert timer["name"] == "train"

    with flaxckpt.Checkpointer(tmp_path / "ours/checkpoints", **ITEMS) as ours:
        ours.save(4, state, dataset=batches.iter, json={"timer": timer})
    assert_equal(trainer.train()[0], whole)

    # Kauldron has saved step 6 in the same directory.
    last = trained(tmp_path / "before", 5, is_saved=False)
    with flaxckpt.Checkpointer(tmp_path / "ours/checkpoints", **ITEMS) as ours:
        assert ours.steps() == [4, 6]
        assert_equal(ours.restore(make_trainer(tmp_path, 6).init_state()), last)


def test_kauldron_reads_step_without_structure(tmp_path):
    trainer = make_trainer(tmp_path, 2)
    state = trainer.init_state()
    with flaxckpt.Checkpointer(tmp_path / "checkpoints", **ITEMS) as checkpointer:
        checkpointer.save(0, state)
    tree = kd.ckpts.Checkpointer(workdir=str(tmp_path), save_interval_steps=1).restore(
        kd.ckpts.items.StandardCheckpointItem(), step=0
    )
    assert_equal(tree["params"], state.params)
