"""A file system of its own, from which the power can be cut; that needs root."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

_SHUTDOWN = 0x8004587D
_WITHOUT_LOG = 2
_IMAGE_BYTES = 320 * 2**20  # the least that xfs takes, and some

KINDS = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}
"""File system -> what makes one."""


class Disk:
    """A file system on a loop device.

    Shut down without writing its log, it is what is left after the power is gone;
    mounting it again replays the log.

    Args:
        root: A directory, for the image and the mount point.
        kind: One of `KINDS`.

    Attributes:
        mount_point: Where it is mounted.
    """

    def __init__(self, root: Path, kind: str) -> None:
        self.mount_point = root / kind
        self._image = root / f"{kind}.img"
        self._kind = kind

    def make(self) -> str:
        """Makes and mounts it; returns why that cannot be done here, or nothing."""
        if os.geteuid() != 0:
            return "cutting the power of a file system needs root"
        for program in (KINDS[self._kind][0], "mount", "umount"):
            if shutil.which(program) is None:
                return f"{program} is not installed"
        self.mount_point.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        made = _run(*KINDS[self._kind], str(self._image))
        if made.returncode != 0:
            return f"no {self._kind} can be made here: {made.stderr.strip()}"
        mounted = self._mount()
        if mounted.returncode != 0:
            return f"no {self._kind} can be mounted here: {mounted.stderr.strip()}"
        return ""

    def _mount(self) -> subprocess.CompletedProcess[str]:
        return _run("mount", "-o", "loop", str(self._image), str(self.mount_point))

    def cut(self) -> None:
        """Cuts the power: what has not reached the disk is lost."""
        descriptor = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
        finally:
            os.close(descriptor)

    def start_again(self) -> None:
        """Mounts it as the machine would when the power is back."""
        for _ in range(100):
            gone = _run("umount", str(self.mount_point))
            if gone.returncode == 0:
                break
            time.sleep(0.1)
        assert gone.returncode == 0, gone.stderr
        mounted = self._mount()
        assert mounted.returncode == 0, mounted.stderr

    def close(self) -> None:
        """Unmounts it, and removes the image."""
        if os.path.ismount(self.mount_point):
            for options in ((), (), ("-l",)):
                gone = _run("umount", *options, str(self.mount_point))
                if gone.returncode == 0:
                    break
                time.sleep(0.5)
        self._image.unlink(missing_ok=True)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
