"""A process that forks victims of faults, with the shim preloaded; see worker.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

MEMORY = Path("/dev/shm")


class Worker:
    """A process that forks victims.

    Args:
        library: The shim, as `shim.build` makes it.
        errors: A file for its standard error.
        module: The module that it runs; it calls `worker.serve`.
    """

    def __init__(self, library, errors, module="tests.faults.worker"):
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ
            | {
                "LD_PRELOAD": str(library),
                "PYTHONPATH": os.pathsep.join(["", *sys.path]),
                "PYTHONFAULTHANDLER": "1",
                "PYTHONWARNINGS": "ignore",  # jax warns of every fork
                "OPENBLAS_NUM_THREADS": "1",
                "XLA_FLAGS": "",
            },
        )

    def __call__(self, do, **request):
        line = json.dumps({"do": do} | request, default=str)
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the worker has died; see its standard error"
        return json.loads(answer)

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)
