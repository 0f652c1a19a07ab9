"""Several processes of one job decide as one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.files import free_port

PROGRAM = Path(__file__).with_name("decide_together.py")


def run_both(directory):
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), str(port), str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_FLAGS": ""},
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0, 0], said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_follow_first_clock_and_any_signal(tmp_path):
    first, second = run_both(tmp_path)
    assert first == second
    time_is_up, stop, _ = first
    assert time_is_up == [5, 10]
    assert stop[0] > 12
    assert "preemption sync point" in stop[1]
