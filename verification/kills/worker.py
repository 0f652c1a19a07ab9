"""A process of a job that restores, and then saves until it is killed.

It prints what happens, a line each: `restored STEP FROM_DIRECTORY`, `started STEP`,
`acknowledged STEP`, `copied STEP`, and `failed` with the error.
"""

import json
import os
import random
import time
import traceback
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors, policies

ROWS = 60
"""Rows that 2 to 6 processes can share."""

_PEER_TIMEOUT_SECS = 30.0


class Moments(NamedTuple):
    mu: object
    count: object


def run(rank, disks, run_directory, port, copies, seed):
    """Restores and saves as one process of a job, until it is killed."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", len(disks), rank)
    try:
        chance = random.Random(f"{seed} {rank}")
        _train(disks, run_directory, copies, chance)
    except BaseException:
        _say("failed", json.dumps(traceback.format_exc()[-1500:]))
        raise


def _train(disks, run_directory, copies, chance):
    events = []
    checkpointer = flaxckpt.Checkpointer(
        run_directory,
        keep=[policies.LatestN(2)],
        staging=lambda index: disks[index],
        keep_staging=[policies.LatestN(2)],
        staging_copies=copies,
        failure_domain=lambda index: disks[index],
        peer_timeout_secs=_PEER_TIMEOUT_SECS,
        sinks=[events.append],
    )
    try:
        restored, step = checkpointer.restore_latest(state(0))
    except errors.CheckpointNotFoundError:
        step = 0
    else:
        check(restored, step)
    far = [e.details["from_directory"] for e in events if e.kind == "restored"]
    _say("restored", step, far[-1] if far else 0)
    while os.getppid() != 1:  # its parent is there
        step += 1
        _say("started", step)
        checkpointer.save(step, state(step)).wait()
        _say("acknowledged", step)
        if copies and chance.random() < 0.7:
            checkpointer.wait_for_copies()
            _say("copied", step)
        time.sleep(chance.uniform(0, 0.2))


def _say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


# ---- the state of a step -----------------------------------------------------------


def _values(step):
    chance = np.random.default_rng(step)
    rows = chance.normal(size=(ROWS, 2**11)).astype(np.float32)
    return {
        "rows": rows,
        "half": chance.normal(size=(ROWS, 64)).astype(jnp.bfloat16),
        "whole": chance.normal(size=(5, 3)).astype(np.float32),
        "mu": chance.normal(size=(ROWS, 64)).astype(np.float32),
        "count": np.int32(step),
    }


def state(step):
    """The state after `step`, on the devices of all processes."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))

    def array(name, spec):
        value, sharding = values[name], NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])

    values, split, all_of_it = _values(step), PartitionSpec("x"), PartitionSpec()
    return {
        "params": {"rows": array("rows", split), "half": array("half", split)},
        "whole": array("whole", all_of_it),
        "opt": Moments(array("mu", split), array("count", all_of_it)),
        "text": f"step {step}",
    }


def check(restored, step):
    """Raises AssertionError unless each value of this process is that of `step`."""
    wanted = state(step)
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    for found, expected in zip(
        jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True
    ):
        if isinstance(expected, str):
            assert found == expected, (found, expected)
            continue
        assert found.dtype == expected.dtype
        for here, there in zip(
            found.addressable_shards, expected.addressable_shards, strict=True
        ):
            assert np.array_equal(np.asarray(here.data), np.asarray(there.data))
