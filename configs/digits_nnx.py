"""Settings of `examples/digits_nnx.py`."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The full run: a few seconds on two CPU cores."""
    config = ConfigDict()
    config.workdir = "runs/digits_nnx"
    config.seed = 0

    config.features = 24
    config.dropout_rate = 0.4

    config.total_steps = 320
    config.batch_size = 64
    config.learning_rate = 3e-3

    # The fields of flaxckpt.configs.CheckpointConfig.
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 40
    config.checkpoint.keep = [
        {"latest": 2},
        {"best": 1, "metric": "accuracy", "mode": "max"},
    ]
    return config


def tiny() -> ConfigDict:
    """A few steps of a small model, for tests."""
    config = get_config()
    config.update(features=4, batch_size=16, total_steps=6)
    config.checkpoint.every_steps = 2
    return config
