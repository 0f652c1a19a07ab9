"""Checkpoints for Flax and Optax: what stock Orbax reads, verified and durable."""

from flaxckpt import configs, datasets, errors, formats, partition, policies, transforms
from flaxckpt._callback import CheckpointCallback
from flaxckpt._checkpointer import Checkpointer
from flaxckpt._diff import CheckpointDiff, LeafDiff, diff
from flaxckpt._events import Event
from flaxckpt._findings import VerifyReport
from flaxckpt._handle import SaveHandle
from flaxckpt._info import ArrayLayout, CheckpointMetadata, LeafInfo, SaveResult
from flaxckpt._plan import LeafPlan, RestorePlan
from flaxckpt._restore import load, metadata, open_leaf, plan
from flaxckpt._save import save, save_async
from flaxckpt._simulation import Simulation, simulate
from flaxckpt._store import StoreOptions
from flaxckpt._stores import set_store_options
from flaxckpt._tools import convert, verify
from flaxckpt.partition import abstract_state, parameter_infos

__all__ = [
    "ArrayLayout",
    "CheckpointCallback",
    "CheckpointDiff",
    "CheckpointMetadata",
    "Checkpointer",
    "Event",
    "LeafDiff",
    "LeafInfo",
    "LeafPlan",
    "RestorePlan",
    "SaveHandle",
    "SaveResult",
    "Simulation",
    "StoreOptions",
    "VerifyReport",
    "abstract_state",
    "configs",
    "convert",
    "datasets",
    "diff",
    "errors",
    "formats",
    "load",
    "metadata",
    "open_leaf",
    "parameter_infos",
    "partition",
    "plan",
    "policies",
    "save",
    "save_async",
    "set_store_options",
    "simulate",
    "transforms",
    "verify",
]
