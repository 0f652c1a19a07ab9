"""Saves and restores again and again, beside a thread and a process that read."""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import BestN, EveryNSteps, LatestN
from tests import ROOT
from verification.soak import samples, states

EPOCH = 50
"""Saves of a `Checkpointer`; then it is closed, and what is held is sampled.

Fewer if the whole work is short, so that there are enough samples.
"""

EPOCHS = 30
"""At least so many epochs."""

RESTORE_EVERY = 10
KEEP = (LatestN(3), BestN(2, "loss", "min"), EveryNSteps(1000))
LAYOUTS = (flaxckpt.ArrayLayout(), flaxckpt.ArrayLayout(codec="zstd"))
RUN_FILES = {"STAGING_OF", "events.jsonl", "statistics.jsonl", "_CHECKPOINT_METADATA"}


def soak(directory, saves, restores, say=print):
    """Runs the work; returns the samples of the writer and the reader, and problems.

    Args:
        directory: An empty directory on a local disk.
        saves: The number of saves.
        restores: The number of restores.
        say: Called with a line at each tenth of the work.
    """
    run, staging = Path(directory, "run"), Path(directory, "staging")
    run.mkdir()
    tracemalloc.start()
    size = max(1, min(EPOCH, saves // EPOCHS))
    reader = Reader(run, size)
    failures, taken, done = Failures(), [], 0
    every = max(1, saves // restores)
    try:
        for epoch in itertools.count():
            if done >= saves:
                break
            last = min(done + size, saves)
            one_epoch(run, staging, epoch, range(done + 1, last + 1), every, failures)
            done = last
            taken.append({"saves": done, **samples.take(), **left(run, staging)})
            if len(taken) % max(1, saves // size // 10) == 0:
                say(" ".join(f"{k}={v:.6g}" for k, v in taken[-1].items()))
    finally:
        read, read_samples = reader.end()
        tracemalloc.stop()
    found = [
        *(f"writer: {line}" for line in samples.problems(taken)),
        *(f"reader: {line}" for line in samples.problems(read_samples)),
        *leftovers(run, staging),
        *failures.lines,
    ]
    if not read:
        found.append("the reader has read nothing")
    return {"writer": taken, "reader": read_samples, "read": read, "problems": found}


class Failures:
    """The failures that events report."""

    def __init__(self):
        self.lines = []

    def note(self, event):
        if event.kind == "failed":
            self.lines.append(f"step {event.step} failed: {dict(event.details)}")


def one_epoch(run, staging, epoch, steps, restore_every, failures):
    """Saves the steps of an epoch, as one run of a program does."""
    make = states.KINDS[epoch % len(states.KINDS)]
    batches = StepIndexed(lambda i: i)
    options = {"layout": LAYOUTS[epoch % len(LAYOUTS)], "keep": KEEP}
    if epoch % 3:
        options["staging"] = staging
    with flaxckpt.Checkpointer(run, sinks=[failures.note], **options) as checkpointer:
        stop = threading.Event()
        watcher = threading.Thread(target=watch, args=(run, stop))
        watcher.start()
        try:
            for step in steps:
                state = make(step)
                loss = {"loss": 1 / (1 + step % 97)}
                handle = checkpointer.save(step, state, metrics=loss, dataset=batches)
                if step % restore_every == 0:
                    handle.wait()
                    restore(checkpointer, step, make, batches)
                if step % 23 == 0:
                    change(checkpointer, step, state)
        finally:
            stop.set()
            watcher.join()
    if epoch % 4 == 0:
        with flaxckpt.Checkpointer(run, keep=KEEP) as checkpointer:
            checkpointer.prune()


def restore(checkpointer, step, make, batches):
    """Restores a step in one of several ways, and checks its values."""
    abstract = make(0) if step % 20 else None
    memory_map = bool(step % 3)
    state = checkpointer.restore(
        abstract, step=step, dataset=batches, memory_map=memory_map
    )
    check(step, state)


def change(checkpointer, step, state):
    """Changes the last step in all the ways that there are."""
    checkpointer.wait()
    checkpointer.add_metrics(step, {"eval": float(step)})
    checkpointer.pin(step)
    checkpointer.unpin(step)
    checkpointer.save(step, state, on_exists="overwrite").wait()
    if not checkpointer.verify(step).ok:
        raise AssertionError(f"step {step} is damaged")


def watch(run, stop):
    """Lists the run from a thread, with a `Checkpointer` of its own each time."""
    while not stop.wait(0.2):
        with flaxckpt.Checkpointer(run, read_only=True) as checkpointer:
            checkpointer.explain()


def left(run, staging):
    """Returns the number of all files and directories."""
    return {"files": sum(1 for root in (run, staging) for _ in root.rglob("*"))}


def leftovers(run, staging):
    """Returns a line for each name that is neither a step nor the run's own file."""
    with flaxckpt.Checkpointer(run, keep=KEEP, staging=staging) as checkpointer:
        checkpointer.prune()
        steps = checkpointer.explain()
    found = [
        f"step {step} is left without a reason" for step, w in steps.items() if not w
    ]
    for root in (run, staging):
        for path in root.iterdir():
            is_ours = path.name in RUN_FILES or path.name.startswith(".")
            if not is_ours and not re.fullmatch(r"\d+", path.name):
                found.append(f"{path} is left")
        found += [f"{path} is left" for path in root.rglob("*READING*")]
    return found


# ---- the reader ---------------------------------------------------------------------


class Reader:
    """A process that reads every step it sees, and samples after each `size` steps."""

    def __init__(self, run, size):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verification.soak.work", str(run), str(size)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def end(self):
        """Ends the reader; returns how many steps it has read, and its samples."""
        answer, _ = self._process.communicate("end\n", timeout=120)
        if self._process.returncode:
            raise AssertionError(
                f"the reader has ended with {self._process.returncode}"
            )
        return tuple(json.loads(answer))


def read(run, size):
    """Reads the steps of a run until a line comes on the input; prints what it held."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set())).start()
    tracemalloc.start()
    taken, count = [], 0
    with flaxckpt.Checkpointer(run) as checkpointer:
        while not ended.is_set():
            for step in checkpointer.new_steps(timeout_secs=1.0, poll_secs=0.02):
                check(step, load_while_replaced(checkpointer.directory / str(step)))
                count += 1
                if count % size == 0:
                    taken.append(samples.take())
                if ended.is_set():
                    break
    sys.stdout.write(json.dumps([count, taken]))


def load_while_replaced(path):
    """Loads a step; a lease keeps it from being deleted, but not from an overwrite.

    A step that is damaged in truth stays so.
    """
    for _ in range(5):
        try:
            return flaxckpt.load(path)
        except errors.DamagedCheckpointError as error:
            damage = error
    raise damage


def check(step, state):
    """Raises an error if a state has the values of another step."""
    found = states.value(state)
    if found != states.expected(step, state):
        raise AssertionError(f"step {step} has the values of step {found}")


if __name__ == "__main__":
    read(sys.argv[1], int(sys.argv[2]))
