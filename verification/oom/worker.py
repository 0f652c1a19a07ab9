"""Does what lacks memory in forks of a process; see tests/faults/worker.py.

A victim opens the run, then one of its allocations fails in one operation. The same
process has memory again then: it looks at all steps, and saves the next.
"""

import contextlib
import faulthandler
import hashlib
import json
import os
import re
import shutil
import traceback
from pathlib import Path

import jax

from flaxckpt import errors
from tests.faults import frozen, scenarios
from tests.faults.worker import in_child, looked_at, named, prepare, serve
from verification.oom.shim import Memory

TIMEOUT_SECS = 300
AFTER = 999  # the step that is saved when there is memory again


def main():
    scenarios.batches(1)  # imports what it needs
    serve(Memory, prepare, run)


class Log(scenarios.Log):
    """A log with memory."""

    def __init__(self, path, memory):
        super().__init__(path)
        self._memory = memory

    def __call__(self, *row):
        with self._memory.exempt():
            super().__call__(*row)


def run(memory, *, scenario, base, work, seen, **fault):
    """Has an operation lack memory, and looks at what is left.

    Args:
        memory: What fails.
        scenario: The name of a scenario.
        base: What `prepare` made.
        work: A new directory.
        seen: A directory with a file for each way in which the run was left, that was
            opened again.
        fault: Arguments of `memory.arm`.
    """
    base, work = Path(base), Path(work)
    shutil.copytree(base, work, symlinks=True)

    def act():
        _act(memory, work, named(scenario), fault)

    code = in_child(act, timeout_secs=TIMEOUT_SECS)
    rows = scenarios.Log.read(work / "log")
    found = {"code": code, "hits": 0, "outcome": "died", "problems": []}
    for row in scenarios.Log.read(work / "found"):
        found |= row[0]
    if _is_new(Path(seen), work / "run", code):
        found["problems"] += looked_at(work, named(scenario), rows)
    shutil.rmtree(work)
    return found


def _act(memory, work, chosen, fault):
    directory, told = work / "run", scenarios.Log(work / "found")
    log = Log(work / "log", memory)
    frozen.start(2**31)
    memory.exempt_thread_starts()
    scenarios.values = memory.exempted(scenarios.values)
    faulthandler.dump_traceback_later(0.9 * TIMEOUT_SECS)
    if isinstance(chosen, scenarios.Reads):
        jax.devices()  # XLA ends the process if it has no memory for its own threads
    ckpt = chosen.open(directory)
    outcome = "done"
    try:
        memory.arm(**fault)
        chosen.do(ckpt, log)
    except errors.CheckpointError as error:
        memory.disarm()
        outcome = type(error).__name__
        if not _is_of_memory(error):
            outcome += f": {error!r:.300}"
    except MemoryError:
        memory.disarm()
        outcome = "MemoryError"
    except BaseException as error:
        memory.disarm()
        text = "".join(traceback.format_exception(error))[-2000:]
        outcome = f"unexpected: {type(error).__name__}: {text}"
    memory.disarm()
    with contextlib.suppress(errors.CheckpointError, MemoryError):
        ckpt.wait()  # a save goes on if only the wait for it lacked memory
    told({"outcome": outcome, "hits": memory.hits(), "seen": memory.seen()})
    problems = scenarios.check(directory, scenarios.Log.read(work / "log"))
    try:
        scenarios.save(ckpt, log, AFTER, goes=ckpt.steps(), shape=chosen.shape)
        if not scenarios.is_state(ckpt.restore(), AFTER, 0):
            problems.append("the next step in the process is not what was saved")
        ckpt.close()
    except Exception as error:
        text = "".join(traceback.format_exception(error))[-2000:]
        problems.append(f"the process does not go on: {text}")
    told({"problems": problems})


def _is_of_memory(error):
    """True if the error says that memory, or threads, are lacking."""
    while error is not None:
        if isinstance(error, MemoryError) or "memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_new(seen, directory, code):
    """True once for each set of names in the run, and each exit code."""
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    text = re.sub("-[0-9a-f]{8}", "", json.dumps([code, names]))
    key = hashlib.sha256(text.encode()).hexdigest()
    try:
        os.close(os.open(seen / key, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main()
