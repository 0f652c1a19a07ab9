"""Loads hostile checkpoints one after another, in a process with limited memory.

    python -m tests.helpers.run_hostile FORMAT DIRECTORY [CASE ...]

Prints a line of JSON before and after each case, so that a process that dies names the
case at fault: `{"case": ..., "begins": true}`, and then its `error`, the processor time
and the peak of additional memory. A module of cases may define `read` to read them.

`metadata`, `plan`, `open_leaf` and `convert` also run for each case: they may succeed,
or raise an error of flaxckpt.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flaxckpt

ADDRESS_SPACE = 4 * 2**30
"""Bytes that may be reserved in addition to the imports."""

HANGS_SECS = 240
"""Seconds after which a case counts as hanging, and the process ends with a traceback.
Many, because the machine may have other work."""

CONVERTED = 2**32
"""Larger states are not converted, if there is space for them."""


def main(format_name: str, directory: str, *names: str) -> None:
    module = importlib.import_module(f"tests.hostile.{format_name}")
    cases, read = module.CASES, getattr(module, "read", load)
    # Modules that are loaded once are not counted.
    flaxckpt.save(Path(directory, "warm"), {"a": 1.0})
    flaxckpt.load(Path(directory, "warm"))
    limit = address_space() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name in names or cases:
        tell({"case": name, "begins": True})
        faulthandler.dump_traceback_later(HANGS_SECS, exit=True)
        root = Path(directory, "".join(c if c.isalnum() else "_" for c in name))
        root.mkdir()
        path = cases[name](root)
        forget_peak()
        before = memory("VmRSS")
        found = {"case": name, **outcome(read, path)}
        tell({**found, "grown": memory("VmHWM") - before})


def outcome(read: Callable[[Path], object], path: Path) -> dict[str, Any]:
    try:
        if read is load:
            try_others(path)
        read(path)
    except flaxckpt.errors.CheckpointError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except BaseException as error:
        text = "".join(traceback.format_exception(error))[-2000:]
        return {"error": f"not ours: {type(error).__name__}", "text": text}
    return {"error": "none", "text": "it was loaded"}


def load(path: Path) -> None:
    flaxckpt.load(path)


def try_others(path: Path) -> None:
    """Runs all operations on a checkpoint except `load`."""
    size = 0
    with attempt():
        found = flaxckpt.metadata(path)
        size = found.total_bytes
        for leaf in list(found.leaves)[:3]:
            with attempt():
                flaxckpt.open_leaf(path, leaf)
    with attempt():
        flaxckpt.plan(path, {"w": 1.0}, missing="init", unused="ignore")
    if size > CONVERTED and size < free_bytes(path):
        return  # allowed, but takes too long
    with attempt():
        flaxckpt.convert(path, path.parent / "converted")
        raise AssertionError("it was converted")


def attempt() -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(flaxckpt.errors.CheckpointError)


def free_bytes(path: Path) -> int:
    found = os.statvfs(path.parent)
    return found.f_bavail * found.f_frsize


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def forget_peak() -> None:
    """Resets the counters: creating and reading earlier cases is not counted."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> int:
    """Returns memory of this process in bytes: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def tell(data: Any) -> None:
    print(json.dumps(data), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
