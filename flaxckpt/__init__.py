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
    from flaxckpt._checkpoint.restore import (
        load,
        load_async,
        metadata,
        open_leaf,
        plan,
    )
    from flaxckpt._checkpoint.save import save, save_async
    from flaxckpt._checkpoint.save_handle import SaveHandle, SaveResult
    from flaxckpt._checkpoint.verify import verify
    from flaxckpt._checkpoint.verify_report import VerifyReport
    from flaxckpt._convert.convert import convert
    from flaxckpt._convert.huggingface import export_huggingface
    from flaxckpt._convert.peft import export_peft
    from flaxckpt._formats.reader import CheckpointMetadata
    from flaxckpt._inspect.bits import BitDiff
    from flaxckpt._inspect.diff import CheckpointDiff, LeafDiff, diff
    from flaxckpt._inspect.replay import ReplayReport, replay
    from flaxckpt._inspect.simulate import Simulation, simulate
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
    "Ambiguity": "_suggest.suggestion",
    "ArrayLayout": "_zarr.array_layout",
    "BitDiff": "_inspect.bits",
    "CheckpointCallback": "_training.callback",
    "CheckpointDiff": "_inspect.diff",
    "CheckpointMetadata": "_formats.reader",
    "Checkpointer": "_run.checkpointer",
    "Event": "_steps.event",
    "LeafDiff": "_inspect.diff",
    "LeafInfo": "_state.leaf",
    "LeafMatch": "_suggest.suggestion",
    "LeafPlan": "_checkpoint.plan",
    "LoadHandle": "_checkpoint.load_handle",
    "ReplayReport": "_inspect.replay",
    "RestorePlan": "_checkpoint.plan",
    "SaveHandle": "_checkpoint.save_handle",
    "SaveResult": "_checkpoint.save_handle",
    "Simulation": "_inspect.simulate",
    "StoreOptions": "_storage.store_options",
    "Suggestion": "_suggest.suggestion",
    "VerifyReport": "_checkpoint.verify_report",
    "abstract_state": "partition",
    "convert": "_convert.convert",
    "diff": "_inspect.diff",
    "export_huggingface": "_convert.huggingface",
    "export_peft": "_convert.peft",
    "load": "_checkpoint.restore",
    "load_async": "_checkpoint.restore",
    "metadata": "_checkpoint.restore",
    "open_leaf": "_checkpoint.restore",
    "parameter_infos": "partition",
    "plan": "_checkpoint.restore",
    "register_leaf": "_state.register_leaf",
    "replay": "_inspect.replay",
    "save": "_checkpoint.save",
    "save_async": "_checkpoint.save",
    "set_store_options": "_storage.store_settings",
    "simulate": "_inspect.simulate",
    "suggest": "_suggest.suggestion",
    "verify": "_checkpoint.verify",
}

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            if name == "__version__":
                return _find_version()
            guessed_names = _doors.import_module(f"{__name__}._util.guessed_names")
            raise guessed_names.unknown_name(__name__, name, _find_module(name))
        home = _HOMES.get(name)
        module = _doors.import_module(f"{__name__}.{home or name}")
        value = module if home is None else getattr(module, name)
        globals()[name] = value
        return value

    def _find_module(name: str) -> str | None:
        """Returns the public module that has a name; None if none has."""
        if name.startswith("_"):
            return None
        for module in (each for each in __all__ if each not in _HOMES):
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
