"""A disk without room, or that is read-only: told, nothing is lost, and it heals."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import LatestN
from tests.helpers import strategies

LAYOUTS = {
    codec: flaxckpt.ArrayLayout(codec=codec, chunk_bytes=2**18)
    for codec in ("none", "zstd")
}


def state(step):
    rng = np.random.default_rng(step)
    return {"params": {f"w{n}": rng.random((256, 256)) for n in range(3)}, "step": step}


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Disk:
    """A tmpfs of its own."""

    def __init__(self, path):
        self.path = path
        path.mkdir()

    def mount(self, options):
        made = run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path))
        if made.returncode != 0:
            pytest.skip(f"no tmpfs can be mounted: {made.stderr.strip()}")

    def remount(self, options):
        made = run("mount", "-o", f"remount,{options}", str(self.path))
        assert made.returncode == 0, made.stderr

    def close(self):
        if os.path.ismount(self.path):
            for options in ((), ("-l",)):
                if run("umount", *options, str(self.path)).returncode == 0:
                    break


@pytest.fixture
def disk(tmp_path):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a file system needs root and mount")
    made = Disk(tmp_path / "disk")
    yield made
    made.close()


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request):
    return LAYOUTS[request.param]


def trouble_and_healing(root, layout, *, begin, end):
    """Two saves, then one while there is trouble, then one when it is over."""
    ckpt = flaxckpt.Checkpointer(root, layout=layout, keep=[LatestN(2)])
    for step in (1, 2):
        ckpt.save(step, state(step)).wait()
    begin()
    for _ in range(2):  # it does not get worse
        with pytest.raises(errors.SaveFailedError) as told:
            ckpt.save(3, state(3)).wait()
        assert len(str(told.value).splitlines()) < 15
        assert str(root / "3") in str(told.value)
        assert ckpt.steps() == [1, 2]
        assert ckpt.verify(2).ok
        strategies.assert_same(state(2), ckpt.restore(memory_map=False))
        names = sorted(path.name for path in root.iterdir())
        assert names == ["1", "2", "events.jsonl"], "nothing is left behind"
    end()
    ckpt.save(3, state(3)).wait()
    assert ckpt.steps() == [2, 3]
    strategies.assert_same(state(3), ckpt.restore(memory_map=False))
    ckpt.close()
    return told.value


def test_recovers_from_full_disk(disk, layout):
    disk.mount("size=24m")
    ballast = disk.path / "ballast"

    def fill():
        free = shutil.disk_usage(disk.path).free
        ballast.write_bytes(b"1" * (free - 600_000))  # less than a third of a step

    error = trouble_and_healing(
        disk.path / "run", layout, begin=fill, end=ballast.unlink
    )
    assert "space" in str(error).lower()


def test_recovers_from_disk_without_free_byte(disk, layout):
    disk.mount("size=24m")
    ballast = disk.path / "ballast"

    def fill():
        with ballast.open("wb", 0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"1" * 4096)

    trouble_and_healing(disk.path / "run", layout, begin=fill, end=ballast.unlink)


def test_recovers_from_disk_without_inodes(disk, layout):
    disk.mount("size=64m,nr_inodes=150")
    many = disk.path / "many"
    many.mkdir()

    def fill():
        found = os.statvfs(disk.path)
        for n in range(found.f_ffree - 5):
            (many / str(n)).touch()

    def free():
        shutil.rmtree(many)

    trouble_and_healing(disk.path / "run", layout, begin=fill, end=free)


def test_recovers_from_read_only_disk(disk, layout):
    disk.mount("size=64m")
    trouble_and_healing(
        disk.path / "run",
        layout,
        begin=lambda: disk.remount("ro"),
        end=lambda: disk.remount("rw"),
    )


def test_skips_damaged_step_on_read_only_disk(disk):
    disk.mount("size=64m")
    ckpt = flaxckpt.Checkpointer(disk.path / "run", layout=LAYOUTS["none"])
    for step in (1, 2):
        ckpt.save(step, state(step)).wait()
    file = disk.path / "run/2/state/d/0.small.0"
    file.write_bytes(file.read_bytes()[:-1])
    disk.remount("ro")
    strategies.assert_same(state(1), ckpt.restore(memory_map=False))
    assert (ckpt.steps(), ckpt.damaged()) == ([1, 2], {})
    disk.remount("rw")
    strategies.assert_same(state(1), ckpt.restore(memory_map=False))
    assert (ckpt.steps(), list(ckpt.damaged())) == ([1], [2])


@pytest.fixture
def small_files():
    """Calls that make the system refuse large files, and accept them again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def begin():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))

    def end():
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    yield begin, end
    end()
    signal.signal(signal.SIGXFSZ, before)


def test_recovers_from_file_size_limit(tmp_path, layout, small_files):
    begin, end = small_files
    error = trouble_and_healing(tmp_path / "run", layout, begin=begin, end=end)
    assert "File too large" in str(error)
