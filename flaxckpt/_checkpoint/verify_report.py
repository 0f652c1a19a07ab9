"""Results of verifying a checkpoint: proved damage, and, apart, unreadable files."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from flaxckpt import _storage, _util, errors
from flaxckpt._types import LeafPath
from flaxckpt._zarr.metadata import Region

_THREADS = 8

HERE = "."
"""Name of the checkpoint itself among names of files and leaves."""


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """Report on reading and verifying a whole checkpoint.

    Attributes:
        path: The checkpoint.
        format: The format, as in `CheckpointMetadata.format`; `unknown` if the format
            cannot be recognised any more.
        step: Step number in a run directory; None for a single checkpoint.
        problems: Leaf path, or file in the checkpoint -> the fault.
        unread: Leaf path or file -> the reason why it could not be read, such as a
            missing permission. This proves no damage.
        unchecked: Leaf path or file -> the reason why its values could not be compared
            with checksums.
        leaves: Number of leaves, without empty containers; None if unknown.
        unreadable: Leaf path -> the reason why a restore cannot read the leaf: the text
            in `problems` or `unread`, the file of the leaf (a file may hold many
            leaves), or the form of its values, such as `quantized as Q4_K`.
        extra: Files that do not belong to the checkpoint. They are harmless.
        places: Name in `problems` or `unread` -> the file and the values in it, such as
            `state/w/c.1.0 -> w, rows 128-255 of 512`, if they are known.
        bytes_checked: Bytes read and compared.
        secs: Duration of the checks in seconds.
        loss: The first proved fault that keeps a restore from reading a leaf; None if
            all leaves can be read, or if nothing is proved.
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
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)
    loss: str | None = None

    @property
    def ok(self) -> bool:
        """True if everything was read without a fault."""
        return not self.problems and not self.unread

    @property
    def damaged_leaves(self) -> frozenset[LeafPath] | None:
        """All leaves that a restore cannot read; None if unknown or without any."""
        if HERE in self.problems:
            return None
        return frozenset(self.unreadable) or None

    @property
    def summary(self) -> str:
        """A line with the number of unreadable leaves and the files that cause this.

        It is empty if all leaves can be read.
        """
        if self.leaves is None:
            return "" if self.ok else "no leaf can be read"
        if not self.unreadable:
            return ""
        files = {
            why: None
            for leaf, why in self.unreadable.items()
            if leaf not in self.problems and leaf not in self.unread
        }
        count = _util.humanize.count(self.leaves, "leaf", "leaves")
        names = errors.first_few(list(self.unreadable), 3)
        reason = f"{errors.first_few(list(files), 3)} ({names})" if files else names
        return f"{len(self.unreadable):,} of {count} cannot be read: {reason}"

    _repr_pretty_ = _util.card.show_printed

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
        for title, findings in (
            ("wrong", self.problems),
            ("could not be read", self.unread),
            ("without checksums", self.unchecked),
        ):
            if findings:
                lines.append(f"{title}: {len(findings)}")
                lines += [
                    f"  {self.places.get(name, name)}: {why}"
                    for name, why in findings.items()
                ]
        if self.extra:
            lines.append(f"not in the checkpoint: {', '.join(self.extra)}")
        return "\n".join(map(errors.printable, lines))


class Check(NamedTuple):
    name: str
    run: Callable[[], object]
    file: str = ""


class StoredPlace(NamedTuple):
    """The place of a fault: a file, and the faulty values along each axis if known."""

    file: str
    region: Region | None = None


NOWHERE = StoredPlace("")


class Findings:
    """Findings of several threads; unless `thorough`, the first ends the checks."""

    def __init__(self, counter: _util.progress.Counter, *, thorough: bool) -> None:
        self.problems: dict[str, str] = {}
        self.missing: set[str] = set()  # names of problems with a missing file
        self.unread: dict[str, str] = {}
        self.unchecked: dict[str, str] = {}
        self.places: dict[str, StoredPlace] = {}  # of leaves among problems and unread
        self.leaves: dict[str, Sequence[LeafPath]] = {}  # that need a file of a fault
        self.counter = counter
        self.thorough = thorough
        self._lock = threading.Lock()

    @property
    def is_enough(self) -> bool:
        """True after the first problem, unless `thorough`."""
        return bool(self.problems) and not self.thorough

    def attempt(
        self, name: str, check: Callable[[], object], place: StoredPlace = NOWHERE
    ) -> None:
        """Calls `check` and records any error under `name`, and its place."""
        if self.is_enough:
            return
        try:
            check()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            self.missing.add(name)
            why = f"{_file_of(error)} is missing"
            self.add(self.problems, name, why, place)
        except (ValueError, errors.DamagedCheckpointError) as error:
            # Too little memory is a fault of this machine, not of the checkpoint.
            is_unread = _util.memory.is_too_large(
                error
            ) or _storage.read_errors.is_unread(error)
            findings = self.unread if is_unread else self.problems
            self.add(findings, name, str(error), place)
        except (OSError, MemoryError) as error:
            why = str(error) or "larger than the memory"
            self.add(self.unread, name, why, place)

    def add(
        self,
        findings: dict[str, str],
        name: str,
        why: str,
        place: StoredPlace = NOWHERE,
    ) -> None:
        """Records the first finding `why` about the leaf or file `name`."""
        with self._lock:
            if name not in findings:
                findings[name] = errors.printable(
                    errors.one_line(errors.join_rows(why))
                )
                self.places.setdefault(name, place)

    def take(self, other: Findings, item: str, names: Mapping[str, str]) -> None:
        """Adds the findings in an item; `names` maps its names to those here."""
        for mine, findings in (
            (self.problems, other.problems),
            (self.unread, other.unread),
            (self.unchecked, other.unchecked),
        ):
            for name, why in findings.items():
                place = other.places.get(name, NOWHERE)
                if place.file:
                    place = place._replace(file=f"{item}/{place.file}")
                self.add(mine, names.get(name, f"{item}/{name}"), why, place)
        self.missing |= {names.get(name, f"{item}/{name}") for name in other.missing}
        self.leaves |= {
            f"{item}/{name}": [names[path] for path in leaves]
            for name, leaves in other.leaves.items()
        }

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
        places: Mapping[str, str] = MappingProxyType({}),
    ) -> VerifyReport:
        return VerifyReport(
            path=str(path),
            format=format_name,
            step=step,
            problems=_sort(self.problems),
            unread=_sort(self.unread),
            unchecked=_sort(self.unchecked),
            leaves=leaves,
            unreadable=_sort(unreadable),
            extra=tuple(sorted(extra)),
            bytes_checked=self.counter.done,
            secs=secs,
            places=_sort(places),
            loss=self._find_loss(unreadable),
        )

    def _find_loss(self, unreadable: Mapping[LeafPath, str]) -> str | None:
        for name, why in sorted(self.problems.items()):
            if name == HERE:
                return why
            if name in unreadable or self.leaves.get(name):
                return f"{name}: {why}"
        return None

    def run(self, checks: Sequence[Check]) -> None:
        _util.threads.each(
            lambda check: self.attempt(check.name, check.run, StoredPlace(check.file)),
            checks,
            threads=_THREADS,
        )


def _sort(findings: Mapping[str, str]) -> Mapping[str, str]:
    return dict(sorted(findings.items()))


def _file_of(error: OSError) -> str:
    return Path(error.filename).name if error.filename else "a file"
