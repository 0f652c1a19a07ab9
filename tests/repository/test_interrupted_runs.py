"""The processes of a test run end with the run, however it ends."""

import os
import select
import signal
import subprocess
import sys

import pytest

from tests import ROOT
from tests.helpers import run_guard

WAITS = """
import os, subprocess, sys, time
from tests.helpers import store_servers

def test_waits(tmp_path):
    code = "import time; time.sleep(600)"
    alone = [sys.executable, "-c", code]
    child = subprocess.Popen(alone, start_new_session=True)
    server = store_servers.Server(alone, 1, tmp_path, "bucket")
    server._has_bucket = lambda: True
    server.start()
    with open("pids.tmp", "w") as file:
        print(os.getpid(), child.pid, server._process.pid, file=file)
    os.rename("pids.tmp", "pids")
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux has pidfd_open")
@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGINT, 0), (signal.SIGINT, 1), (signal.SIGKILL, 0)]
)
def test_children_and_servers_end_with_run(tmp_path, number, workers):
    (tmp_path / "test_waits.py").write_text(WAITS)
    inherited = {k: v for k, v in os.environ.items() if k != run_guard.MARK}
    options = ["-p", "conftest", "-p", "no:cacheprovider", f"-n{workers}"]
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", f"--rootdir={tmp_path}", *options],
        cwd=tmp_path,
        env=inherited | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (tmp_path / "pids").exists():
            assert run.poll() is None
            select.select([], [], [], 0.05)
        pids = (tmp_path / "pids").read_text().split()
        processes = [os.pidfd_open(int(pid)) for pid in pids]
        run.send_signal(number)
        assert run.wait() != 0
        for process in processes:
            assert select.select([process], [], [], 60)[0]
            os.close(process)
    finally:
        run.kill()
        run.wait()
