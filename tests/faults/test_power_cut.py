"""A power cut loses no step whose save has ended.

Real file systems on loop devices are shut down without writing their logs, which is
what is left after the power is gone; mounting them again replays the log. That needs
root. FLAXCKPT_POWER_CUTS=50 makes so many cuts in all; by default there are a few.
"""

import contextlib
import itertools
import os
import random
import shutil
import subprocess
import threading
import time

import numpy as np
import pytest

import flaxckpt
from benchmarks.power import KINDS, Disk
from flaxckpt import errors
from flaxckpt.policies import LatestN
from tests.helpers import strategies

CUTS = int(os.environ.get("FLAXCKPT_POWER_CUTS", "8"))
DELAYS_SECS = (0.0, 0.3) if CUTS < 50 else (0.0, 0.0, 0.3, 1.0, 6.0, 12.0)
LONGEST_SAVE_SECS = 0.1
LAYOUTS = [
    flaxckpt.ArrayLayout(codec=codec, chunk_bytes=2**19) for codec in ("none", "zstd")
]


@pytest.fixture(params=sorted(KINDS))
def disk(request, tmp_path):
    made = Disk(tmp_path, request.param)
    try:
        if obstacle := made.make():
            pytest.skip(obstacle)
        yield made
    finally:
        made.close()


def state(step):
    rng = np.random.default_rng(step)
    return {
        "params": {f"w{n}": rng.random((256, 512)) for n in range(2)},
        "bias": rng.random(7),
        "step": step,
    }


class Victim:
    """A run on a disk that loses its power; what it was told is kept elsewhere."""

    def __init__(self, disk):
        self.disk = disk
        self.root = disk.mount_point / "run"
        self.next = 1
        self.safe = 0
        self.tried = 0

    def train(self, steps, layout, cut_in_last):
        """Saves some steps; the power may be cut while the last is being saved."""
        ckpt = flaxckpt.Checkpointer(self.root, layout=layout, keep=[LatestN(2)])
        for n in range(steps):
            self.tried = self.next
            self.next += 1
            cutter = None
            if cut_in_last is not None and n == steps - 1:
                cutter = threading.Timer(cut_in_last, self.disk.cut)
                cutter.start()
            try:
                ckpt.save(self.tried, state(self.tried)).wait()
                self.safe = self.tried
            except (errors.CheckpointError, OSError):
                assert cutter is not None, "nothing else has failed"
            finally:
                if cutter is not None:
                    cutter.join()
        with contextlib.suppress(errors.CheckpointError, OSError):
            ckpt.close()

    def check(self):
        """All that is listed is good, and nothing that was safe is lost."""
        ckpt = flaxckpt.Checkpointer(self.root, keep=[LatestN(2)])
        listed = ckpt.steps()
        for step in listed:
            report = ckpt.verify(step)
            assert report.ok, str(report)
            found = ckpt.restore(step=step, memory_map=False)
            strategies.assert_same(state(step), found)
        assert listed, "steps were safe"
        assert self.safe <= listed[-1] <= self.tried
        if self.safe > 1:
            assert len(listed) >= 2, "the one before is kept, too"
        assert ckpt.damaged() == {}
        self.next = listed[-1] + 1
        self.safe = listed[-1]
        ckpt.close()


def test_power_cut_loses_no_finished_save(disk):
    chance = random.Random(f"power {disk.mount_point.name}")
    victim = Victim(disk)
    victim.train(2, LAYOUTS[0], None)
    delays = itertools.cycle(DELAYS_SECS)
    for n in range(-(-CUTS // len(KINDS))):
        layout = LAYOUTS[n // 2 % 2]
        if n % 2:
            after = chance.uniform(0, LONGEST_SAVE_SECS)
            victim.train(2, layout, cut_in_last=after)
            disk.restart()
        else:
            victim.train(2, layout, None)
            time.sleep(next(delays))
            # That the power is really cut: what nobody has synced is gone.
            unsynced = disk.mount_point / f"unsynced-{n}"
            unsynced.write_bytes(bytes(range(256)) * 16)
            disk.cut()
            disk.restart()
            assert not unsynced.exists() or unsynced.stat().st_size == 0
        victim.check()


def test_disk_restarts_despite_mount_in_another_namespace(disk):
    """Else each file of the disk cannot be read, after the restart as before."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    file = disk.mount_point / "file"
    file.write_text("content")
    os.sync()
    command = ("unshare", "--mount", "sh", "-c", "echo; exec sleep 60")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        if not other.stdout.readline():
            pytest.skip("a mount namespace cannot be created here")
        disk.cut()
        disk.restart()
        try:
            assert file.read_text() == "content"
            file.write_text("new")
        finally:
            other.kill()
