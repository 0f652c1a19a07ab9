"""Work that goes on where it stopped: what of it is done, and where that is kept."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from flaxckpt import _storage, errors
from flaxckpt._types import JSON

_WORK = "work.json"
_DONE = "done.txt"
_MAX_BYTES = 256 * 2**20


class Journal:
    """A directory in which something is made, piece by piece.

    Attributes:
        output: What is made; a directory.
        done: Names of the pieces that are there and durable.
    """

    def __init__(self, directory: Path, work: Mapping[str, JSON]) -> None:
        """Goes on with the same work, or starts it anew.

        Args:
            directory: Ours alone.
            work: What is made of what, JSON. Pieces of any other work are removed.

        Raises:
            CheckpointExistsError: Another process works here.
            OSError: `directory` cannot be made.
        """
        self._directory = directory
        self.output = directory / "out"
        _storage.local.make_directory(directory)
        self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise errors.CheckpointExistsError(
                f"another process is at work in {directory}: wait for it"
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
            # To append to a pipe would wait for its reader.
            done.unlink(missing_ok=True)
        if self.output.is_dir() and _content(directory / _WORK) == work:
            # What comes after the last line end was cut off by a crash.
            whole, _, rest = _content(done).rpartition(b"\n")
            if rest:
                _storage.local.replace(done, whole + b"\n" if whole else b"")
            return set(whole.decode(errors="replace").split("\n")) - {""}
        _storage.local.remove_tree(self.output)
        done.unlink(missing_ok=True)
        _storage.local.replace(directory / _WORK, work)
        self.output.mkdir()
        _storage.local.sync_directory(directory)
        return set()

    def add(self, pieces: Iterable[str]) -> None:
        """Notes that pieces are done; they must be durable already."""
        names = list(pieces)
        self._file.write("".join(f"{name}\n" for name in names).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.update(names)

    def forget(self) -> None:
        """Lets nobody go on with this work any more: what was made is moved away."""
        (self._directory / _WORK).unlink(missing_ok=True)
        _storage.local.sync_directory(self._directory)

    def remove(self) -> None:
        """Removes the directory, when what was made has been moved out of it."""
        _storage.local.remove_tree(self._directory)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        os.close(self._lock)


def _content(path: Path) -> bytes:
    try:
        return _storage.local.read(path, max_bytes=_MAX_BYTES)
    except (FileNotFoundError, errors.DamagedCheckpointError):
        return b""
