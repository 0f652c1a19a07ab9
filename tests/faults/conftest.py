"""Workers that do things while something fails; without a C compiler, tests skip."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults import shim

HERE = Path(__file__).parent
MEMORY = Path("/dev/shm")


class Worker:
    """A process that forks victims; see worker.py."""

    def __init__(self, library, errors):
        self._process = subprocess.Popen(
            [sys.executable, HERE / "worker.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ
            | {
                "LD_PRELOAD": str(library),
                "PYTHONPATH": os.pathsep.join(sys.path),
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


@pytest.fixture(scope="session")
def library():
    built = shim.build()
    if built is None:
        pytest.skip("faults in system calls need a C compiler, and Linux")
    return built


@pytest.fixture(scope="session")
def worker(library, tmp_path_factory):
    with (tmp_path_factory.mktemp("worker") / "errors").open("w+") as errors:
        worker = Worker(library, errors)
        yield worker
        worker.close()
        errors.seek(0)
        sys.stderr.write(errors.read()[-20_000:])


@pytest.fixture
def directory(tmp_path):
    """Where syncing takes no time, if there is such a place."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as found:
        yield Path(found)
