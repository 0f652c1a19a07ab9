"""Checkpoints for Flax and Optax: what stock Orbax reads, verified and durable."""

from flaxckpt import datasets, errors, formats, policies
from flaxckpt._callback import CheckpointCallback
from flaxckpt._checkpointer import Checkpointer
from flaxckpt._info import ArrayLayout, CheckpointMetadata, LeafInfo, SaveResult
from flaxckpt._restore import load, metadata
from flaxckpt._save import SaveHandle, save, save_async

__all__ = [
    "ArrayLayout",
    "CheckpointCallback",
    "CheckpointMetadata",
    "Checkpointer",
    "LeafInfo",
    "SaveHandle",
    "SaveResult",
    "datasets",
    "errors",
    "formats",
    "load",
    "metadata",
    "policies",
    "save",
    "save_async",
]
