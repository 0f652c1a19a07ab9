"""A power cut loses no step whose save has ended.

Real file systems on loop devices are shut down without writing their logs, which is
what is left after the power is gone; mounting them again replays the log. That needs
root. FLAXCKPT_POWER_CUTS=50 makes so many cuts in all; by default there are a few.
"""

import contextlib
import fcntl
import itertools
import os
import random
import shutil
import struct
import subprocess
import threading
import time

import numpy as np
import pytest
import strategies

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import LatestN

SHUTDOWN = 0x8004587D
WITHOUT_LOG = 2
KINDS = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
IMAGE_BYTES = 320 * 2**20  # the least that xfs takes, and some
CUTS = int(os.environ.get("FLAXCKPT_POWER_CUTS", "8"))
DELAYS_SECS = (0.0, 0.3) if CUTS < 50 else (0.0, 0.0, 0.3, 1.0, 6.0, 12.0)
LONGEST_SAVE_SECS = 0.1
LAYOUTS = [
    flaxckpt.ArrayLayout(store=store, chunk_bytes=2**19) for store in ("files", "ocdbt")
]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Disk:
    """A file system of its own, from which the power can be cut."""

    def __init__(self, root, kind):
        self.image = root / f"{kind}.img"
        self.mount_point = root / kind
        self.kind = kind
        self.mount_point.mkdir()
        with self.image.open("wb") as file:
            file.truncate(IMAGE_BYTES)

    def make(self):
        made = run(*KINDS[self.kind], str(self.image))
        if made.returncode != 0:
            pytest.skip(f"no {self.kind} can be made here: {made.stderr.strip()}")
        mounted = self.mount()
        if mounted.returncode != 0:
            pytest.skip(f"no {self.kind} can be mounted: {mounted.stderr.strip()}")

    def mount(self):
        return run("mount", "-o", "loop", str(self.image), str(self.mount_point))

    def cut(self):
        """Cuts the power: what has not reached the disk is lost."""
        descriptor = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", WITHOUT_LOG))
        finally:
            os.close(descriptor)

    def start_again(self):
        for _ in range(100):
            gone = run("umount", str(self.mount_point))
            if gone.returncode == 0:
                break
            time.sleep(0.1)
        assert gone.returncode == 0, gone.stderr
        mounted = self.mount()
        assert mounted.returncode == 0, mounted.stderr

    def close(self):
        if os.path.ismount(self.mount_point):
            for options in ((), (), ("-l",)):
                if run("umount", *options, str(self.mount_point)).returncode == 0:
                    break
                time.sleep(0.5)
        self.image.unlink(missing_ok=True)


@pytest.fixture(params=sorted(KINDS))
def disk(request, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("cutting the power of a file system needs root")
    for program in (KINDS[request.param][0], "mount", "umount"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    made = Disk(tmp_path, request.param)
    try:
        made.make()
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


def test_a_power_cut_loses_no_step_whose_save_has_ended(disk):
    chance = random.Random(f"power {disk.kind}")
    victim = Victim(disk)
    victim.train(2, LAYOUTS[0], None)
    delays = itertools.cycle(DELAYS_SECS)
    for n in range(-(-CUTS // len(KINDS))):
        layout = LAYOUTS[n // 2 % 2]
        if n % 2:
            after = chance.uniform(0, LONGEST_SAVE_SECS)
            victim.train(2, layout, cut_in_last=after)
            disk.start_again()
        else:
            victim.train(2, layout, None)
            time.sleep(next(delays))
            # That the power is really cut: what nobody has synced is gone.
            unsynced = disk.mount_point / f"unsynced-{n}"
            unsynced.write_bytes(bytes(range(256)) * 16)
            disk.cut()
            disk.start_again()
            assert not unsynced.exists() or unsynced.stat().st_size == 0
        victim.check()
