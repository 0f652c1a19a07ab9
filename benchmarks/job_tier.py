"""Saves a state to a directory of each process; restores it with and without a loss.

`benchmarks.several` says how it is run. Process 0 prints seconds by what took them, as
JSON; and the bytes of memory that the copies took.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from benchmarks import memory, several, timing

SAVES = 3
"""Timed saves of a job, after one that is not timed."""

_STEPS = 1500
"""Training steps after a save, which the copies of its parts take time from."""

_LOST = 2
"""The process whose directory is removed."""


def main() -> None:
    """Runs a process, as given on the command line."""
    job = several.join()
    mesh = jax.make_mesh((several.DEVICES,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rows = 2**10 if job.quick else 2**20
    state = {
        f"layer_{i}": jax.make_array_from_callback(
            (rows, 8), sharding, _values(rows, i).__getitem__
        )
        for i in range(16)
    }
    renew = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.sin(x + 1), tree))
    is_alone = job.processes == 1
    staging = job.directory / f"disk-{job.rank}"

    def report(**figures: float) -> None:
        if job.rank == 0:
            print(json.dumps(figures), flush=True)

    def wait_for_all(what: str) -> float:
        timing.settle()
        if not is_alone:
            multihost_utils.sync_global_devices(what)
        return time.perf_counter()

    events: list[flaxckpt.Event] = []

    def open_run(
        copies: int = 0 if is_alone else 1, staging: Path = staging
    ) -> flaxckpt.Checkpointer:
        return flaxckpt.Checkpointer(
            staging.parent / "run",
            keep=[flaxckpt.policies.OnSteps([0])],  # nothing else is uploaded
            staging=staging,
            keep_staging=[flaxckpt.policies.LatestN(9)],  # no deletion beside a copy
            staging_copies=copies,
            failure_domain=str,
            sinks=[events.append],
        )

    with open_run() as checkpointer:
        for number in range(SAVES + 1):
            state = jax.block_until_ready(renew(state))
            start = wait_for_all(f"save {number}")
            checkpointer.save(number + 1, state).wait()
            seconds = time.perf_counter() - start
            if number:
                report(acknowledged=seconds)
                checkpointer.wait_for_copies()
                continue
            with memory.extra_memory() as extra:  # takes time: not beside a timed one
                checkpointer.wait_for_copies()
            if not is_alone:
                report(copy_memory=extra[0])
    if is_alone:
        return
    copied = [event for event in events if event.kind == "copied"][1:]
    for event in copied:
        report(copy=float(str(event.details["secs"])))
    train = jax.jit(lambda x: jnp.tanh(x @ x / 512))
    for number in range(SAVES):
        for copies, loop in ((0, "loop"), (1, "loop_with_copies")):
            place = job.directory / loop / f"disk-{job.rank}"
            with open_run(copies, place) as checkpointer:
                start = wait_for_all(f"{loop} {number}")
                checkpointer.save(number, state)
                x = jnp.ones((512, 512))
                for _ in range(5 if job.quick else _STEPS):
                    x = train(x).block_until_ready()
                report(**{loop: time.perf_counter() - start})
                checkpointer.wait_for_copies()
    newest = staging / str(SAVES + 1)
    for number in range(SAVES):
        start = wait_for_all(f"local copy {number}")
        _copy(newest, job.directory / f"copy-{job.rank}-{number}", job.rank)
        report(local_copy=time.perf_counter() - start)
    for number in range(2 * SAVES):
        is_lost = number % 2 == 1
        if is_lost and job.rank == _LOST:
            shutil.rmtree(staging)
        with open_run() as checkpointer:
            start = wait_for_all(f"restore {number}")
            restored = checkpointer.restore(state)
            jax.block_until_ready(restored)
            if not is_alone:
                multihost_utils.sync_global_devices(f"restored {number}")
            seconds = time.perf_counter() - start
        report(**{"restore_after_loss" if is_lost else "restore": seconds})


def _copy(step: Path, target: Path, rank: int) -> None:
    """Copies the files that this process has written, durably."""
    for file in step.glob(f"state/d/{rank}.*/*"):
        to = target / file.relative_to(step)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to)
        with to.open("rb") as copy:
            os.fsync(copy.fileno())


def _values(rows: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=(rows, 8)).astype(np.float32)


if __name__ == "__main__":
    main()
