"""What was found of the files of a checkpoint, by several threads.

What is wrong is told apart from what could not be looked at, which proves nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from flaxckpt import _storage, _util, errors
from flaxckpt._types import LeafPath

_THREADS = 8

LARGE = 2**62
"""For what may have any size."""

HERE = "."
"""What stands for the checkpoint itself where files and leaves are named."""


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found of a checkpoint when all of it was read.

    Attributes:
        path: The checkpoint.
        format: Whose it is, as `CheckpointMetadata.format`; `unknown` if that cannot
            be told any more.
        step: Its number under a run directory; None if it stands alone.
        problems: Leaf path, or file in the checkpoint -> what is wrong with it.
        unread: The same -> why it could not be looked at, such as a permission. That
            proves no damage.
        unchecked: The same -> why nothing tells whether its values are the ones that
            were written: it has no checksum.
        leaves: How many leaves the checkpoint has, without empty containers; None if
            nothing tells.
        unreadable: Leaf path -> why a restore cannot read that leaf: what `problems` or
            `unread` say of it, or the file that holds it. One file may hold many.
        extra: Files that are no part of the checkpoint. They do no harm.
        bytes_checked: How many bytes were read and compared.
        secs: How long that took.
    """

    path: str
    format: str
    step: int | None
    problems: Mapping[str, str]
    unread: Mapping[str, str]
    unchecked: Mapping[str, str]
    leaves: int | None
    unreadable: Mapping[LeafPath, str]
    extra: tuple[str, ...]
    bytes_checked: int
    secs: float

    @property
    def ok(self) -> bool:
        """Whether all of it was read and nothing is wrong."""
        return not self.problems and not self.unread

    @property
    def summary(self) -> str:
        """How many leaves cannot be read, and which files are the cause, in one line.

        Empty if all leaves can be read.
        """
        if self.leaves is None:
            return "" if self.ok else "none of its leaves can be read"
        if not self.unreadable:
            return ""
        files = {
            why: None
            for leaf, why in self.unreadable.items()
            if leaf not in self.problems and leaf not in self.unread
        }
        count = _util.humanize.count(self.leaves, "leaf", "leaves")
        names = errors.first_few(list(self.unreadable), 3)
        told = f"{len(self.unreadable):,} of {count} cannot be read: "
        return told + (
            f"{errors.first_few(list(files), 3)} ({names})" if files else names
        )

    def __str__(self) -> str:
        size = _util.humanize.size(self.bytes_checked)
        size = f"{size} checked in {_util.humanize.secs(self.secs)}"
        if self.problems:
            verdict = "is damaged"
        else:
            verdict = "could not be read" if self.unread else "is good"
        lines = [f"{self.path} {verdict} ({self.format}; {size})"]
        if self.summary:
            lines.append(self.summary)
        for title, found in (
            ("wrong", self.problems),
            ("could not be read", self.unread),
            ("without checksums", self.unchecked),
        ):
            if found:
                lines.append(f"{title}: {len(found)}")
                lines += [f"  {name}: {why}" for name, why in found.items()]
        if self.extra:
            lines.append(f"no part of it: {', '.join(self.extra)}")
        return "\n".join(map(errors.printable, lines))


class Findings:
    """What is found by several threads.

    Args:
        counter: Of the bytes that are read.
        thorough: Whether to go on after the first problem.
    """

    def __init__(self, counter: _util.progress.Counter, *, thorough: bool) -> None:
        self.problems: dict[str, str] = {}
        self.missing: set[str] = set()  # those problems that are missing files
        self.unread: dict[str, str] = {}
        self.unchecked: dict[str, str] = {}
        self.counter = counter
        self.thorough = thorough
        self._lock = threading.Lock()

    @property
    def is_enough(self) -> bool:
        """Whether nothing more needs to be known."""
        return bool(self.problems) and not self.thorough

    def attempt(self, name: str, check: Callable[[], object]) -> None:
        """Calls `check`, and takes down what it raises."""
        if self.is_enough:
            return
        try:
            check()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            self.missing.add(name)
            self.add(self.problems, name, f"{_file_of(error)} is missing")
        except (ValueError, errors.DamagedCheckpointError) as error:
            # How much memory is free depends on this machine.
            is_unread = _util.memory.is_too_large(
                error
            ) or _storage.permissions.is_unread(error)
            self.add(self.unread if is_unread else self.problems, name, str(error))
        except (OSError, MemoryError) as error:
            self.add(self.unread, name, str(error) or "larger than the memory")

    def add(self, found: dict[str, str], name: str, why: str) -> None:
        """Takes down what was found of the leaf or file `name`, the first time."""
        with self._lock:
            found.setdefault(name, errors.printable(" ".join(why.split())[:300]))

    def report(
        self,
        path: Path,
        format_name: str,
        step: int | None,
        extra: Iterable[str],
        secs: float,
        *,
        leaves: int | None = None,
        unreadable: Mapping[LeafPath, str] = MappingProxyType({}),
    ) -> VerifyReport:
        """All that was found of the checkpoint `path`."""
        return VerifyReport(
            str(path),
            format_name,
            step,
            _told(self.problems),
            _told(self.unread),
            _told(self.unchecked),
            leaves,
            _told(unreadable),
            tuple(sorted(extra)),
            self.counter.done,
            secs,
        )

    def run(self, checks: Sequence[tuple[str, Callable[[], object]]]) -> None:
        """Does all `checks`, several at a time."""
        _util.threads.each(lambda check: self.attempt(*check), checks, threads=_THREADS)


def _told(found: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(sorted(found.items())))


def _file_of(error: OSError) -> str:
    return Path(error.filename).name if error.filename else "a file"


# ---- files ------------------------------------------------------------------------


def stream(
    file: Path,
    root: Path,
    count: Callable[[int], object],
    take: Callable[[memoryview], object],
    size: int = 0,
) -> None:
    """Reads a file from its beginning to its end, part by part.

    Args:
        file: Which.
        root: Where it has to be.
        count: Called with the size of each part.
        take: Called with each part.
        size: How long it should be, which saves a request to a store; 0 if it may be
            small.
    """
    for part in _storage.of(file).stream(file, root, size):
        take(part)
        count(len(part))


def names(root: Path, directory: Path) -> set[str]:
    """The paths below `root` of all that is in a directory and is no directory."""
    below = _storage.of(directory).files_below(directory)
    return {f"{(directory / name).relative_to(root)}" for name in below}


def unreadable(path: Path) -> str | None:
    """Why a file or directory of a checkpoint cannot be read; None if all can be."""
    storage = _storage.of(path)
    try:
        for file in storage.all_files(path):
            with contextlib.suppress(FileNotFoundError, ValueError):
                for _ in storage.stream(file, path, LARGE):
                    pass
    except OSError as error:
        return str(error)
    return None
