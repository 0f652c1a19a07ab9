"""Checkpoints for Flax and Optax: what stock Orbax reads, verified and durable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt import (
        configs,
        datasets,
        errors,
        formats,
        maps,
        partition,
        policies,
        transforms,
    )
    from flaxckpt._checkpoint.load_handle import LoadHandle
    from flaxckpt._checkpoint.plan import LeafPlan, RestorePlan
    from flaxckpt._checkpoint.restore import load, load_async, metadata, open_leaf, plan
    from flaxckpt._checkpoint.save import save, save_async
    from flaxckpt._checkpoint.save_handle import SaveHandle, SaveResult
    from flaxckpt._checkpoint.verify import verify
    from flaxckpt._checkpoint.verify_report import VerifyReport
    from flaxckpt._convert.convert import convert
    from flaxckpt._convert.exports import export_huggingface, export_peft
    from flaxckpt._formats.reader import CheckpointMetadata
    from flaxckpt._inspect.bits import BitDiff
    from flaxckpt._inspect.diff import CheckpointDiff, LeafDiff, diff
    from flaxckpt._inspect.replay import ReplayReport, replay
    from flaxckpt._inspect.simulate import Simulation, simulate
    from flaxckpt._inspect.simulate_tier import SimulatedTier
    from flaxckpt._run.checkpointer import Checkpointer
    from flaxckpt._state.leaf import LeafInfo
    from flaxckpt._state.register_leaf import register_leaf
    from flaxckpt._steps.event import Event
    from flaxckpt._storage.store_options import StoreOptions
    from flaxckpt._storage.store_settings import set_store_options
    from flaxckpt._suggest.suggestion import Ambiguity, LeafMatch, Suggestion, suggest
    from flaxckpt._training.callback import CheckpointCallback
    from flaxckpt._zarr.array_layout import ArrayLayout
    from flaxckpt.partition import abstract_state, parameter_infos

    __version__: str

__all__ = [
    "Ambiguity",
    "ArrayLayout",
    "BitDiff",
    "CheckpointCallback",
    "CheckpointDiff",
    "CheckpointMetadata",
    "Checkpointer",
    "Event",
    "LeafDiff",
    "LeafInfo",
    "LeafMatch",
    "LeafPlan",
    "LoadHandle",
    "ReplayReport",
    "RestorePlan",
    "SaveHandle",
    "SaveResult",
    "SimulatedTier",
    "Simulation",
    "StoreOptions",
    "Suggestion",
    "VerifyReport",
    "abstract_state",
    "configs",
    "convert",
    "datasets",
    "diff",
    "errors",
    "export_huggingface",
    "export_peft",
    "formats",
    "load",
    "load_async",
    "maps",
    "metadata",
    "open_leaf",
    "parameter_infos",
    "partition",
    "plan",
    "policies",
    "register_leaf",
    "replay",
    "save",
    "save_async",
    "set_store_options",
    "simulate",
    "suggest",
    "transforms",
    "verify",
]

# Imported at their first use: importing jax takes a second, and the help texts of the
# command do not need it.
_HOMES = {
    "_checkpoint.load_handle": "LoadHandle",
    "_checkpoint.plan": "LeafPlan RestorePlan",
    "_checkpoint.restore": "load load_async metadata open_leaf plan",
    "_checkpoint.save": "save save_async",
    "_checkpoint.save_handle": "SaveHandle SaveResult",
    "_checkpoint.verify": "verify",
    "_checkpoint.verify_report": "VerifyReport",
    "_convert.convert": "convert",
    "_convert.exports": "export_huggingface export_peft",
    "_formats.reader": "CheckpointMetadata",
    "_inspect.bits": "BitDiff",
    "_inspect.diff": "CheckpointDiff LeafDiff diff",
    "_inspect.replay": "ReplayReport replay",
    "_inspect.simulate": "Simulation simulate",
    "_inspect.simulate_tier": "SimulatedTier",
    "_run.checkpointer": "Checkpointer",
    "_state.leaf": "LeafInfo",
    "_state.register_leaf": "register_leaf",
    "_steps.event": "Event",
    "_storage.store_options": "StoreOptions",
    "_storage.store_settings": "set_store_options",
    "_suggest.suggestion": "Ambiguity LeafMatch Suggestion suggest",
    "_training.callback": "CheckpointCallback",
    "_zarr.array_layout": "ArrayLayout",
    "partition": "abstract_state parameter_infos",
}

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            if name == "__version__":
                return _find_version()
            guessed_names = _doors.import_module(f"{__name__}._util.guessed_names")
            raise guessed_names.unknown_name(__name__, name, _find_module(name))
        home = _find_home(name)
        module = _doors.import_module(f"{__name__}.{home or name}")
        value = module if home is None else getattr(module, name)
        globals()[name] = value
        return value

    def _find_home(name: str) -> str | None:
        return next((home for home, has in _HOMES.items() if name in has.split()), None)

    def _find_module(name: str) -> str | None:
        if name.startswith("_"):
            return None
        for module in (each for each in __all__ if _find_home(each) is None):
            if name in _doors.import_module(f"{__name__}.{module}").__all__:
                return module
        return None

    def _find_version() -> str:
        metadata = _doors.import_module("importlib.metadata")
        try:
            return metadata.version(__name__)
        except metadata.PackageNotFoundError:  # used from its source tree
            raise AttributeError(f"{__name__} is not installed") from None

    def __dir__() -> list[str]:
        return sorted([*__all__, *(name for name in globals() if name[:2] == "__")])
