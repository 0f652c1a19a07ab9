"""A few kills of real processes: nothing is lost, and nothing is wrong."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_processes_lose_and_corrupt_nothing(seed):
    command = [sys.executable, "-m", "verification", "kills", "--rounds", "4"]
    ended = subprocess.run(
        [*command, "--first", str(seed)], capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "4 kills, 0 problems" in ended.stdout
