"""State in flaxckpt's modules, of which each simulated process has its own.

`SWAPPED` names the attributes that change while flaxckpt runs. While a process runs,
the modules have its values. `HARMLESS` names the containers that never change, or that
simulated processes may share, each with the reason; a test finds all others.
"""

import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from flaxckpt._util import forks

SWAPPED: dict[str, tuple[str, ...]] = {
    "flaxckpt._checkpoint.commit": ("_guard", "_locks"),
    "flaxckpt._checkpoint.save_handle": (
        "_is_ending",
        "_registered_in",
        "_unfinished",
        "_unreported",
    ),
    "flaxckpt._distributed.operation": ("_groups",),
    "flaxckpt._storage.commit_marker": ("_locks",),
    "flaxckpt._storage.leases": ("_leases",),
    "flaxckpt._storage.locks": ("_living", "_pending", "_seen"),
    "flaxckpt._storage.store_requests": ("_shared", "_user"),
    "flaxckpt._storage.store_settings": ("_options", "_stores"),
    "flaxckpt._storage.temporary": ("_claimed",),
    "flaxckpt._util.progress": ("_open", "_showing"),
    "flaxckpt._util.threads": ("_beating",),
}

_PACKAGES = tuple(
    f"flaxckpt.{name}"
    for name in ("_checkpoint", "_distributed", "_run", "_steps", "_storage", "_util")
)

_TABLE = "a table that never changes"

HARMLESS: dict[str, str] = {
    "flaxckpt._checkpoint.overwrite._OTHER_DIRECTORIES": _TABLE,
    "flaxckpt._checkpoint.plan._STYLES": _TABLE,
    "flaxckpt._run.events._LOGGERS": _TABLE,
    "flaxckpt._policy_forms.FORMS": _TABLE,
    "flaxckpt._storage.store_requests._TENSORSTORE_RETRIES": _TABLE,
    "flaxckpt._storage.store_requests._RETRIES_OF_ARRAYS": _TABLE,
    "flaxckpt._util.gc_pause._pauses": "empty while the collector is disabled",
    "flaxckpt._steps.names._WAYS": _TABLE,
    "flaxckpt._util.guessed_names._CALLED": _TABLE,
}

stand_ins: dict[int, Callable[[], object]] = {}
"""ID of a real class or function -> its stand-in, while installed."""


def _fresh(value: Any) -> Any:
    """Returns the value that an attribute has in a new process."""
    if isinstance(value, forks.PerProcess):
        return forks.PerProcess(stand_ins.get(id(value._make), value._make))
    if type(value) in (threading.Event, threading.local):
        return stand_ins[id(type(value))]()
    if isinstance(value, dict | set | list | weakref.WeakValueDictionary):
        return type(value)()
    return None


class ProcessState:
    """The values of the swapped attributes in one process."""

    def __init__(self) -> None:
        self._values: list[tuple[dict[str, Any], str, Any]] = [
            (names, name, _fresh(original)) for names, name, original in _kept
        ]

    def load(self) -> None:
        """Gives the modules the values of this process."""
        for names, name, value in self._values:
            names[name] = value

    def keep(self) -> None:
        """Takes the values of this process from the modules."""
        self._values = [(names, name, names[name]) for names, name, _ in self._values]


_kept: list[tuple[dict[str, Any], str, Any]] = []
"""Names of a module, the name of an attribute, and its value outside of all worlds."""


def remember() -> None:
    """Remembers the values of all attributes, to restore them after each world."""
    swapped = {importlib.import_module(name): names for name, names in SWAPPED.items()}
    _kept[:] = [
        (vars(module), name, vars(module)[name])
        for module, names in swapped.items()
        for name in names
    ]


def restore() -> None:
    """Gives the modules the values that they have outside of all worlds."""
    for names, name, original in _kept:
        names[name] = original


def known_state() -> set[str]:
    """Returns the attributes that are swapped or harmless: `module.name`."""
    swapped = {
        f"{module}.{name}" for module, names in SWAPPED.items() for name in names
    }
    return swapped | HARMLESS.keys()


def mutable_state() -> set[str]:
    """Returns the attributes of modules that may change: `module.name`."""
    kinds = (dict, set, list, forks.PerProcess, threading.Event, threading.local)
    return {
        f"{name}.{attribute}"
        for name, module in sys.modules.items()
        if name.startswith(_PACKAGES)
        for attribute, value in vars(module).items()
        if isinstance(value, kinds) and not attribute.startswith("__")
    }
