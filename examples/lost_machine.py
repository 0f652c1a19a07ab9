"""Four processes train, one loses its machine, three go on from their local disks.

    python -m examples.lost_machine [DIRECTORY]

Each process has a directory that stands for the disk of its machine. It saves its part
of each step there, and gets a copy of the part of another. The directory of the run
stands for a store far away: nothing is read from it. On a cluster, each machine has its
own disk, and `staging="/local/run"` is the same path on all of them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt.policies import LatestN

LOST = 2
KILLED_AFTER = 3
STEPS = 6


def train(root: Path, machines: list[int], *, stop_at: int | None) -> None:
    """Trains, in each process of a job.

    Args:
        root: The directory of the run, and of the machines.
        machines: The machine of each process.
        stop_at: A step after which all processes are killed, as by their launcher.
    """
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    @jax.jit
    def init() -> TrainState:
        params = {"w": jax.random.normal(jax.random.key(0), (2400, 512))}
        tx = optax.adam(0.05)
        state: TrainState = TrainState.create(apply_fn=None, params=params, tx=tx)
        return state

    shapes = jax.eval_shape(init)
    shardings = jax.tree.map(lambda x: by_rows if x.ndim else everywhere, shapes)
    state = jax.jit(init, out_shardings=shardings)()

    @jax.jit
    def train_step(state: TrainState) -> TrainState:
        new: TrainState = state.apply_gradients(grads=state.params)
        return new

    restored = []
    with flaxckpt.Checkpointer(
        root / "run",
        keep=[LatestN(1)],
        staging=lambda process: root / f"machine-{machines[process]}",
        staging_copies=1,
        failure_domain=lambda process: f"machine {machines[process]}",
        sinks=[lambda event: restored.append(event) if event.kind == "restored" else 0],
    ) as checkpointer:
        on_step = flaxckpt.CheckpointCallback(checkpointer, every_steps=1)
        state, start = on_step.restore_or_init(state)
        report(f"{jax.process_count()} processes begin at step {start}")
        if start:
            report(f"the state has the digest {digest(state, everywhere)}")
        for event in restored:
            far = event.details["from_directory"]
            write_line(f"process {jax.process_index()}: {far} bytes from afar")
        for step in range(start + 1, STEPS + 1):
            state = train_step(state)
            on_step(step, state)
            if step == stop_at:
                checkpointer.wait_for_copies()
                report(f"the state has the digest {digest(state, everywhere)}")
                os.kill(os.getpid(), signal.SIGKILL)
    report(f"step {STEPS} is saved")


def digest(state: TrainState, everywhere: NamedSharding) -> str:
    """Returns a digest of the values; all processes call it."""
    gather = jax.jit(lambda x: x, out_shardings=everywhere)
    values = [np.asarray(gather(leaf)) for leaf in jax.tree.leaves(state)]
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def report(text: str) -> None:
    """Prints a line, in process 0."""
    if jax.process_index() == 0:
        write_line(text)


def write_line(text: str) -> None:
    """Prints a line in one piece: the processes share the output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_job(root: Path, machines: list[int], *, stop_at: int = 0) -> bool:
    """Runs a process for each machine; returns True if all of them succeed."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    command = [sys.executable, "-m", "examples.lost_machine"]
    rest = [",".join(map(str, machines)), str(port), str(root), str(stop_at)]
    processes = [
        subprocess.Popen([*command, str(rank), *rest], env=environment)
        for rank in range(len(machines))
    ]
    try:
        codes = [process.wait() for process in processes]
        return not any(codes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(root: Path) -> None:
    """Runs four processes until they are killed, then three without a machine."""
    if run_job(root, [0, 1, 2, 3], stop_at=KILLED_AFTER):
        sys.exit("no process was killed")
    shutil.rmtree(root / f"machine-{LOST}")
    print(f"machine {LOST} is lost", flush=True)
    if not run_job(root, [machine for machine in range(4) if machine != LOST]):
        sys.exit("the second job failed")
    print(flaxckpt.verify(root / "run" / str(STEPS)), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 6:
        rank, port, stop_at = int(sys.argv[1]), sys.argv[3], int(sys.argv[5])
        machines = [int(machine) for machine in sys.argv[2].split(",")]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", len(machines), rank)
        train(Path(sys.argv[4]), machines, stop_at=stop_at or None)
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
