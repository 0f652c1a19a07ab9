"""Saves a state that is sharded over the processes of a job, and times each save.

`benchmarks.several` says how it is run. Process 0 prints the seconds of each save until
the commit, as JSON.
"""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from benchmarks import several, timing

SAVES = 4
"""Timed saves of a job, after one that is not timed."""


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
    for number in range(SAVES + 1):
        state = jax.block_until_ready(renew(state))  # equal values would be linked
        timing.settle()
        multihost_utils.sync_global_devices(f"save {number}")
        start = time.perf_counter()
        flaxckpt.save(job.directory / str(number), state)
        seconds = time.perf_counter() - start
        if number and job.rank == 0:
            print(json.dumps({"seconds": seconds}), flush=True)


def _values(rows: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=(rows, 8)).astype(np.float32)


if __name__ == "__main__":
    main()
