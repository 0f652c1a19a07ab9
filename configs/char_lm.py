"""Settings of `examples/char_lm.py`."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The full run: about half a minute on two CPU cores."""
    config = ConfigDict()
    config.workdir = "runs/char_lm"
    config.seed = 0

    config.context = 64  # characters that the model looks back
    config.dim = 96
    config.layers = 2
    config.heads = 4
    config.dropout_rate = 0.1

    config.total_steps = 1000
    config.batch_size = 16
    config.learning_rate = 3e-3
    config.warmup_steps = 50
    config.weight_decay = 0.01
    config.clip_norm = 1.0

    config.eval_every = 100
    config.eval_windows = 256

    # The fields of flaxckpt.configs.CheckpointConfig.
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 100
    config.checkpoint.keep = [
        {"latest": 2},
        {"best": 1, "metric": "eval/loss", "mode": "min"},
    ]
    return config


def tiny() -> ConfigDict:
    """A few steps of a small model, for tests."""
    config = get_config()
    config.update(context=16, dim=16, layers=1, heads=2, batch_size=4)
    config.update(total_steps=8, warmup_steps=2, eval_windows=8)
    config.update(eval_every=2, checkpoint={"every_steps": 2})
    return config
