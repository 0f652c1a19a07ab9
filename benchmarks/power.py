"""A separate file system whose power can be cut; needs root."""

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
_IMAGE_BYTES = 320 * 2**20  # a little more than the minimum of xfs

KINDS = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}
"""File system -> the command that creates it."""


class Disk:
    """A file system on a loop device.

    A shutdown without writing the log leaves the state after a power cut; the next
    mount replays the log.

    Args:
        root: A directory, for the image and the mount point.
        kind: One of `KINDS`.

    Attributes:
        mount_point: The mount point.
    """

    def __init__(self, root: Path, kind: str) -> None:
        self.mount_point = root / kind
        self._image = root / f"{kind}.img"
        self._kind = kind

    def make(self) -> str:
        """Creates and mounts it; returns the reason if that is impossible, else ""."""
        if os.geteuid() != 0:
            return "cutting the power of a file system needs root"
        for program in (KINDS[self._kind][0], "mount", "umount"):
            if shutil.which(program) is None:
                return f"{program} is not installed"
        self.mount_point.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        creation = _run(*KINDS[self._kind], str(self._image))
        if creation.returncode != 0:
            return f"{self._kind} cannot be created here: {creation.stderr.strip()}"
        mount = self._mount()
        if mount.returncode != 0:
            return f"{self._kind} cannot be mounted here: {mount.stderr.strip()}"
        return ""

    def _mount(self) -> subprocess.CompletedProcess[str]:
        # The copy of an image has its UUID, which xfs mounts twice only if asked to.
        options = "loop,nouuid" if self._kind == "xfs" else "loop"
        return _run("mount", "-o", options, str(self._image), str(self.mount_point))

    def cut(self) -> None:
        """Cuts the power: data that has not reached the disk is lost."""
        descriptor = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
        finally:
            os.close(descriptor)

    def restart(self) -> None:
        """Mounts it again, as a machine does when the power is back.

        Mounts a copy of the image: a process that was started in a mount namespace of
        its own keeps the file system without power, and a second mount of the same
        image would be that file system again.
        """
        for _ in range(100):
            unmount = _run("umount", str(self.mount_point))
            if unmount.returncode == 0:
                break
            time.sleep(0.1)
        assert unmount.returncode == 0, unmount.stderr
        copy = self._image.with_suffix(".copy")
        copying = _run("cp", "--sparse=always", str(self._image), str(copy))
        assert copying.returncode == 0, copying.stderr
        copy.replace(self._image)
        mount = self._mount()
        assert mount.returncode == 0, mount.stderr

    def close(self) -> None:
        """Unmounts it, and removes the image."""
        if os.path.ismount(self.mount_point):
            for options in ((), (), ("-l",)):
                if _run("umount", *options, str(self.mount_point)).returncode == 0:
                    break
                time.sleep(0.5)
        self._image.unlink(missing_ok=True)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
