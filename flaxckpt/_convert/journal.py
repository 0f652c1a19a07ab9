"""Journal of an interrupted conversion: the durable pieces and their directory."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from flaxckpt import _storage, errors
from flaxckpt._types import JSON, Closing

_WORK = "work.json"
_DONE = "done.txt"
_MAX_BYTES = 256 * 2**20


class Journal(Closing):
    """A directory for output by pieces; `done` has the names of durable pieces."""

    def __init__(
        self, directory: Path, work: Mapping[str, JSON], *, mode: int | None = None
    ) -> None:
        """Continues the same work, or starts new work and removes pieces of other work.

        `directory` is for this journal only. Its parents are made with `mode`, if it is
        to be private meanwhile; None for the umask's. Raises CheckpointExistsError if
        another process uses the directory.
        """
        self._directory = directory
        self.output = directory / "out"
        _storage.of(directory).make_directory(directory.parent, mode=mode)
        _storage.of(directory).make_directory(directory)
        if mode is not None:
            _storage.modes.set_on_directory(directory, _storage.modes.PRIVATE)
        self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise errors.CheckpointExistsError(
                f"another process uses {directory}: wait until it ends"
            ) from None
        except OSError:
            pass  # a file system without locks
        try:
            self.done = self._begin(json.dumps(work, sort_keys=True).encode())
            self._file = (directory / _DONE).open("ab")
        except BaseException:
            os.close(self._lock)
            raise

    def _begin(self, work: bytes) -> set[str]:
        directory = self._directory
        done = directory / _DONE
        if not done.is_file() or done.is_symlink():
            # Appending to a pipe would wait for a reader.
            done.unlink(missing_ok=True)
        if self.output.is_dir() and _read_if_exists(directory / _WORK) == work:
            # A crash has truncated the last line if it has no line end.
            whole, _, rest = _read_if_exists(done).rpartition(b"\n")
            if rest:
                _storage.of(done).replace(done, whole + b"\n" if whole else b"")
            return set(whole.decode(errors="replace").split("\n")) - {""}
        _storage.of(self.output).remove_tree(self.output)
        done.unlink(missing_ok=True)
        _storage.of(directory).replace(directory / _WORK, work)
        self.output.mkdir()
        _storage.of(directory).sync_directory(directory)
        return set()

    def add(self, pieces: Iterable[str]) -> None:
        """Records pieces as done; the pieces must already be durable."""
        names = list(pieces)
        self._file.write("".join(f"{name}\n" for name in names).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.update(names)

    def forget(self) -> None:
        """Ends the work: no later call continues it. Call before moving the output."""
        (self._directory / _WORK).unlink(missing_ok=True)
        _storage.of(self._directory).sync_directory(self._directory)

    def remove(self) -> None:
        """Removes the directory, after the output has moved to another place."""
        # NFS and FUSE keep an open file under a hidden name: the directory would not
        # be empty.
        self._file.close()
        _storage.of(self._directory).remove_tree(self._directory)

    def close(self) -> None:
        """Ends the use of the directory."""
        self._file.close()
        os.close(self._lock)


def _read_if_exists(path: Path) -> bytes:
    try:
        return _storage.of(path).read(path, max_bytes=_MAX_BYTES)
    except (FileNotFoundError, errors.DamagedCheckpointError):
        return b""
