"""Restores a state that all processes need, from a bucket or from each other.

`benchmarks.several` says how it is run; BROADCAST_URL and BROADCAST_ENDPOINT name the
bucket. Process 0 prints the seconds of each way, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from benchmarks import several, timing

URL, ENDPOINT = "BROADCAST_URL", "BROADCAST_ENDPOINT"

EACH, ONCE, PEERS = "each reads", "read_once", "peers"
"""Each process reads all from the bucket; each reads a part, and they exchange the
parts; or each has a part on its disk, and gets the others from its peers."""

_ROUNDS = 3


def main() -> None:
    """Runs a process, as given on the command line."""
    job = several.join()
    url, endpoint = os.environ[URL], os.environ[ENDPOINT]
    flaxckpt.set_store_options(
        url.rpartition("/")[0],
        flaxckpt.StoreOptions(endpoint=endpoint, region="us-east-1"),
    )
    mesh = jax.make_mesh((several.DEVICES,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    rows = 2**10 if job.quick else 2**18
    state = {
        f"layer_{i}": jax.make_array_from_callback(
            (rows, 8), sharding, _values(rows, i).__getitem__
        )
        for i in range(16)
    }
    staging = job.directory / f"disk-{job.rank}"

    def open_near() -> flaxckpt.Checkpointer:
        return flaxckpt.Checkpointer(
            job.directory / "run",
            keep=[flaxckpt.policies.OnSteps([0])],  # nothing is uploaded
            staging=staging,
        )

    with flaxckpt.Checkpointer(url) as far:
        far.save(1, state)
    for number in range(_ROUNDS + 1):
        for way in (EACH, ONCE, PEERS):
            if way == PEERS:
                shutil.rmtree(staging, ignore_errors=True)
                with open_near() as near:
                    near.save(number + 1, state)
            checkpointer = (
                open_near()
                if way == PEERS
                else flaxckpt.Checkpointer(url, read_only=True, read_once=way == ONCE)
            )
            timing.settle()
            multihost_utils.sync_global_devices(f"begin {number} {way}")
            start = time.perf_counter()
            restored = checkpointer.restore(state)
            jax.block_until_ready(restored)
            multihost_utils.sync_global_devices(f"end {number} {way}")
            seconds = time.perf_counter() - start
            checkpointer.close()
            del restored
            if job.rank == 0 and number:
                print(json.dumps({way: seconds}), flush=True)


def _values(rows: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=(rows, 8)).astype(np.float32)


if __name__ == "__main__":
    main()
