"""Which file system holds a path, and whether it is of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from flaxckpt._types import PathLike

# File systems of this machine. Elsewhere another machine may cut a file short, which
# kills whoever has it mapped, and pages may be old.
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
    """Whether `path` is on a file system of this machine, where mapping is safe."""
    return kind(os.fspath(path)) in _LOCAL


def kind(path: str) -> str:
    """The kind of file system that holds `path`; empty if that is not known."""
    path = os.path.realpath(path) + "/"
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().split(b"\n")
    except OSError:
        return ""
    holding: dict[str, str] = {}
    for line in mounts:
        where, _, kind = os.fsdecode(line).partition(" - ")
        fields = where.split(" ")
        if len(fields) > 4 and kind:
            mount = fields[4].rstrip("/") + "/"
            if "\\" in mount:
                mount = _unescaped(mount)
            if path.startswith(mount):
                holding[mount] = kind.split(" ")[0]  # the last one hides the others
    return holding[max(holding, key=len)] if holding else ""


def _unescaped(mount: str) -> str:
    """A mount point, in which mountinfo writes blanks as octal numbers."""
    for char in " \t\n\\":
        mount = mount.replace(f"\\{ord(char):03o}", char)
    return mount
