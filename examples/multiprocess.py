"""Two processes train, one is killed, and four continue from the last saved step.

    python -m examples.multiprocess [DIRECTORY]

The processes run on this machine, with two devices each. On a cluster, the launcher
takes the role of `main`: it ends the other processes when one is lost, and starts the
job again with the available processes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import LatestN

SAVE_EVERY = 4
KILLED_AFTER = 9
STEPS = 20


def train(directory: str, *, stop_at: int | None = None) -> None:
    """Trains, in each process of a job.

    Args:
        directory: The run directory, which all processes share.
        stop_at: A step after which process 1 is killed, as if its machine failed.
    """
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    @jax.jit
    def init() -> TrainState:
        params = {"w": jax.random.normal(jax.random.key(0), (64, 8))}
        tx = optax.adam(0.05)
        state: TrainState = TrainState.create(apply_fn=None, params=params, tx=tx)
        return state

    # Parameters and moments are split over all devices of all processes.
    shapes = jax.eval_shape(init)
    shardings = jax.tree.map(lambda x: by_rows if x.ndim else everywhere, shapes)
    state = jax.jit(init, out_shardings=shardings)()

    def global_batch(i: int) -> jax.Array:
        batch = np.random.default_rng(i).normal(size=(32, 64)).astype(np.float32)
        return jax.make_array_from_callback(batch.shape, by_rows, lambda at: batch[at])

    @jax.jit
    def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_of(params: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((x @ params["w"] - x[:, :8]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    batches = StepIndexed(global_batch)  # elastic: all processes have the same index
    with flaxckpt.Checkpointer(directory, keep=[LatestN(2)]) as checkpointer:
        on_step = flaxckpt.CheckpointCallback(
            checkpointer, every_steps=SAVE_EVERY, dataset=batches
        )
        state, start = on_step.restore_or_init(state)
        if jax.process_index() == 0:
            print(f"{jax.process_count()} processes begin at step {start}", flush=True)
        for step in range(start + 1, STEPS + 1):
            state, loss = train_step(state, next(batches))
            on_step(step, state, metrics={"loss": float(loss)})
            if step == stop_at and jax.process_index() == 1:
                checkpointer.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    if jax.process_index() == 0:
        print(f"step {STEPS} is saved, the loss is {float(loss):.4f}", flush=True)


def start(rank: int, count: int, port: int, directory: str, stop_at: int) -> None:
    """Joins the job and trains."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
    train(directory, stop_at=stop_at or None)


def run_job(count: int, directory: Path, *, stop_at: int = 0) -> bool:
    """Runs the processes of a job; returns True if all of them succeed."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    arguments = [str(count), str(port), str(directory), str(stop_at)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "examples.multiprocess", str(rank), *arguments],
            env=environment,
        )
        for rank in range(count)
    ]
    try:
        # The last process first, because it is killed.
        codes = [process.wait() for process in reversed(processes[1:])]
        if any(codes):
            print(f"a process ended with {codes[0]}: the job ends", flush=True)
            return False
        return processes[0].wait() == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(directory: Path) -> None:
    """Runs two processes until one is killed, then four."""
    if run_job(2, directory, stop_at=KILLED_AFTER):
        sys.exit("no process was killed")
    print(f"the newest step is {flaxckpt.metadata(directory).step}", flush=True)
    if not run_job(4, directory):
        sys.exit("the second job failed")
    print(flaxckpt.verify(directory / str(STEPS)), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 6:
        rank, count, port = map(int, sys.argv[1:4])
        start(rank, count, port, sys.argv[4], int(sys.argv[5]))
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary) / "run")
