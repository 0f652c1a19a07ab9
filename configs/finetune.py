"""Settings of `examples/finetune.py`."""

from ml_collections import ConfigDict

from configs import char_lm


def get_config() -> ConfigDict:
    """The full run: about half a minute on two CPU cores."""
    config = char_lm.get_config()
    config.workdir = "runs/finetune"
    config.pretrain_steps = 800
    config.total_steps = 100
    config.warmup_steps = 10
    config.checkpoint.every_steps = 100
    config.checkpoint.keep = []  # everything
    return config


def tiny() -> ConfigDict:
    """A small model, for tests: large enough to learn something."""
    config = get_config()
    config.update(context=16, dim=32, layers=1, heads=2)
    config.update(pretrain_steps=400, total_steps=50, warmup_steps=5, eval_windows=64)
    return config
