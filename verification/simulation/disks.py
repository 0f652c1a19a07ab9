"""Simulated disks of several machines: they fail one by one, are lost, and lose power.

Each is a directory of the file system of `filesystem`. What a process has synced is
noted, so that a power cut can take the rest away.
"""

import errno
import os
import shutil
from pathlib import Path
from random import Random

from verification.simulation import filesystem, kernel

_ERRORS = (errno.EIO, errno.ENOSPC)


class Disks(filesystem.FileSystem):
    """The files of a world with several disks, each a directory below the root.

    Attributes:
        failing: Directory -> the chance that a call below it fails.
    """

    def __init__(
        self, world: kernel.World, root: Path, weather: filesystem.Weather
    ) -> None:
        super().__init__(world, root, weather)
        self.failing: dict[Path, float] = {}
        self._contents: dict[int, bytes] = {}  # inode of a file -> what is synced
        self._names: dict[int, dict[str, int]] = {}  # inode of a directory -> the same
        self._directories_seen: set[int] = set()

    def call(self, name: str, path: object, *, can_fail: bool = True) -> None:
        super().call(name, path, can_fail=can_fail)
        if can_fail and self.failing:
            full = self.full(path)
            for directory, chance in self.failing.items():
                if full.startswith(f"{directory}/") and (
                    chance >= 1 or self._world.random.random() < chance
                ):
                    code = self._world.random.choice(_ERRORS)
                    self._world.record(f"{name} {full}", errno.errorcode[code])
                    raise OSError(code, os.strerror(code), full)

    def synced(self, descriptor: int) -> None:
        with self.observing():
            status = os.fstat(descriptor)
            path = Path(self.full(descriptor))
            try:
                if path.is_dir():
                    self._names[status.st_ino] = self._list(path)
                else:
                    self._contents[status.st_ino] = path.read_bytes()
            except FileNotFoundError:  # removed meanwhile
                return

    def _list(self, directory: Path) -> dict[str, int]:
        with os.scandir(directory) as entries:
            found = {}
            for entry in sorted(entries, key=lambda entry: entry.name):
                found[entry.name] = entry.inode()
                if entry.is_dir(follow_symlinks=False):
                    self._directories_seen.add(entry.inode())
            return found

    def cut_power(self, disk: Path, random: Random) -> None:
        """Takes away what was not synced: each file and directory by chance.

        Call it when no process uses the disk.
        """
        with self.observing():
            names, contents = self._read(disk)
            new = disk.with_name(f"{disk.name}-new")
            chance = random.choice((0.0, 0.5, 1.0))

            def is_kept() -> bool:
                return random.random() < chance

            def rebuild(inode: int, path: Path) -> None:
                if inode in names or inode in self._names:
                    now, synced = names.get(inode), self._names.get(inode, {})
                    entries = now if now is not None and is_kept() else synced
                    path.mkdir()
                    for name, entry in entries.items():
                        rebuild(entry, path / name)
                elif inode in self._directories_seen:
                    path.mkdir()
                else:
                    now, synced = contents.get(inode), self._contents.get(inode, b"")
                    path.write_bytes(now if now is not None and is_kept() else synced)

            rebuild(disk.stat().st_ino, new)
            shutil.rmtree(disk)
            new.rename(disk)
            for path in sorted(disk.rglob("*"), reverse=True):
                self.stamp(path)  # not as late as the first look at it
            names, contents = self._read(disk)  # all that is left is synced
            self._names |= names
            self._contents |= contents

    def _read(self, disk: Path) -> tuple[dict[int, dict[str, int]], dict[int, bytes]]:
        """Returns the names and the contents of a disk, by inode."""
        names, contents = {}, {}
        for path in (disk, *disk.rglob("*")):
            inode = path.stat().st_ino
            if path.is_dir():
                names[inode] = self._list(path)
            else:
                contents[inode] = path.read_bytes()
        return names, contents
