"""Workers that do things while something fails; without a C compiler, tests skip."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults import shim
from tests.faults.process import MEMORY, Worker


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
