"""Loads hostile checkpoints one after another, in a process that may not take much.

    python run_hostile.py FORMAT DIRECTORY [CASE ...]

Prints a line of JSON before each case and one after it, so that a process which dies
names the case at fault: `{"case": ..., "begins": true}`, and then its `error`, how
many lines that has, and by how much the memory of the process has grown at most.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import flaxckpt

ADDRESS_SPACE = 4 * 2**30
"""Bytes that may be reserved beyond what importing jax has taken."""


def main(format_name: str, directory: str, *names: str) -> None:
    cases = importlib.import_module(f"hostile.{format_name}").CASES
    # What is loaded once and for all is not to be counted.
    flaxckpt.save(Path(directory, "warm"), {"a": 1.0})
    flaxckpt.load(Path(directory, "warm"))
    limit = address_space() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = peak()
    for name in names or cases:
        tell({"case": name, "begins": True})
        root = Path(directory, "".join(c if c.isalnum() else "_" for c in name))
        root.mkdir()
        found = {"case": name, **outcome(cases[name](root))}
        tell({**found, "grown": peak() - before})


def outcome(path: Path) -> dict[str, Any]:
    try:
        flaxckpt.load(path)
    except flaxckpt.errors.CheckpointError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except BaseException as error:
        text = "".join(traceback.format_exception(error))[-2000:]
        return {"error": f"not ours: {type(error).__name__}", "text": text}
    return {"error": "none", "text": "it was loaded"}


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tell(data: Any) -> None:
    print(json.dumps(data), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
