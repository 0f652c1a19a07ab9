"""Two processes of one job, which agree when to save and when to stop.

    python decide_together.py RANK PORT DIRECTORY

The first one's clock runs, and the second one is told to stop by the cluster. Prints
the steps at which the time is up, and the one at which to stop.
"""

import json
import os
import signal
import sys
import time

import jax

rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

import flaxckpt  # noqa: E402

now = 0.0
ckpt = flaxckpt.Checkpointer(directory)
on_step = flaxckpt.CheckpointCallback(ckpt, every_secs=5, clock=lambda: now)
hook = on_step
hook._start()
time_is_up = []
stop = None
for step in range(1, 1000):
    now += 1.0 if rank == 0 else 0.1
    is_up, notice = hook._preemption.agree(hook._triggers)
    if is_up:
        time_is_up.append(step)
        hook._triggers.restart_clock()
    if notice is not None:
        stop = [step, notice.name]
        break
    if step == 12 and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if step > 12:
        time.sleep(0.01)
told = on_step.should_stop()
sys.stdout.write(json.dumps([time_is_up[:2], stop, told]) + "\n")
