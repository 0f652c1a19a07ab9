"""The file system of a path: kind, and location on this machine or elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from flaxckpt._storage.paths import is_remote
from flaxckpt._types import PathLike

# File systems of this machine. On other file systems, another machine may truncate a
# file, which kills processes that have it mapped, and cached pages may be stale.
_LOCAL = frozenset(
    (
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "overlay",
        "tmpfs",
        "xfs",
        "zfs",
    )
)


def is_local(path: PathLike) -> bool:
    """Returns True for a file system of this machine, where files can be mapped."""
    return kind(path) in _LOCAL


def free_bytes(path: Path) -> int | None:
    """Returns the free bytes at `path`; None for no limit."""
    return None if is_remote(path) else shutil.disk_usage(path).free


def forget_cached(file: Path) -> None:
    """Drops a file from the page cache of this machine, if cached."""
    if is_remote(file) or not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def kind(path: PathLike) -> str:
    """Returns the kind of file system, or `object store`; empty if unknown."""
    if is_remote(path):
        return "object store"
    path = os.path.realpath(path) + "/"
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().split(b"\n")
    except OSError:
        return ""
    holding: dict[str, str] = {}
    for line in mounts:
        before, _, after = os.fsdecode(line).partition(" - ")
        fields = before.split(" ")
        if len(fields) > 4 and after:
            mount = fields[4].rstrip("/") + "/"
            if "\\" in mount:
                mount = _unescaped(mount)
            if path.startswith(mount):
                holding[mount] = after.split(" ")[
                    0
                ]  # the last mount hides earlier ones
    return holding[max(holding, key=len)] if holding else ""


def _unescaped(mount: str) -> str:
    """Returns a mount point without mountinfo's octal escapes of white space."""
    for char in " \t\n\\":
        mount = mount.replace(f"\\{ord(char):03o}", char)
    return mount
