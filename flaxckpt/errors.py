"""Every error that flaxckpt raises on purpose.

    CheckpointError
    ├── CheckpointNotFoundError   (FileNotFoundError)  nothing at the path or step
    ├── CheckpointExistsError     (FileExistsError)    the path or step is in use
    ├── CheckpointFormatError     (ValueError)         not a supported format
    ├── DamagedCheckpointError    (OSError)            files are missing or corrupt
    ├── RestoreMismatchError      (ValueError)         the state does not match
    ├── ResumeMismatchError       (ValueError)         a resumed run would diverge
    ├── PartitionError            (ValueError)         invalid partition specs
    ├── UnsupportedLeafError      (TypeError)          a leaf cannot be saved
    ├── LeafNameError             (ValueError)         leaf names collide or are unsafe
    ├── DatasetStateError         (TypeError)          an iterator without usable state
    ├── OptionError               (ValueError)         invalid arguments
    │   └── ArgumentError         (TypeError)          a call that Python refuses
    ├── UnknownNameError          (AttributeError)     a name of another library
    ├── ReadOnlyError             (PermissionError)    writing through a reader
    ├── SaveFailedError           (OSError)            the bytes could not be written
    ├── SaveCancelledError        (RuntimeError)       a save was cancelled
    ├── StoreError                (OSError)            an object store failed
    └── CheckpointTimeoutError    (TimeoutError)       a deadline has passed

Each error is also a subclass of the matching builtin, and carries its facts as
attributes, so that callers never parse messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointFormatError",
    "CheckpointNotFoundError",
    "CheckpointTimeoutError",
    "DamagedCheckpointError",
    "DatasetStateError",
    "LeafNameError",
    "Mismatch",
    "OptionError",
    "OutOfMemoryError",
    "PartitionError",
    "ReadOnlyError",
    "RestoreMismatchError",
    "ResumeMismatchError",
    "SaveCancelledError",
    "SaveFailedError",
    "StoreError",
    "UnknownNameError",
    "UnsupportedLeafError",
]

ROWS_SHOWN = 8
_LONGEST_ROW = 2000


class CheckpointError(Exception):
    """Base class of all flaxckpt errors."""

    def __str__(self) -> str:
        return "\n".join(map(printable, super().__str__().split("\n")))

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by calling the class, whose arguments may be others than its message: a
        # pool of processes waits forever for an error that it cannot read.
        reduced: Any = super().__reduce__()
        _, args, *state = reduced
        return (_with_args, (type(self), args), *state)


def _with_args(cls: type[CheckpointError], args: tuple[Any, ...]) -> CheckpointError:
    """Returns an error with the message that another one has made of its facts."""
    error = cls.__new__(cls, *args)
    error.args = args
    return error


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint at this path, or no such step."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A committed checkpoint already exists at the path or step."""


class CheckpointFormatError(CheckpointError, ValueError):
    """The files at the path are not a checkpoint in a supported format."""


class DamagedCheckpointError(CheckpointError, OSError):
    """Missing or corrupt parts of a checkpoint.

    Attributes:
        leaves: Leaf path -> the reason why its values cannot be read; empty if the
            damage was found elsewhere.
    """

    def __init__(self, *args: object, leaves: Mapping[str, str] | None = None) -> None:
        super().__init__(*args)
        self.leaves = dict(leaves or {})


class OutOfMemoryError(CheckpointError, MemoryError):
    """The memory does not suffice to restore an undamaged step."""


class OptionError(CheckpointError, ValueError):
    """Invalid argument value."""


class ArgumentError(OptionError, TypeError):
    """A call with an unknown or missing argument; the message has the right call."""


class UnknownNameError(CheckpointError, AttributeError):
    """An attribute that has another name here; the message has the right name."""


class ReadOnlyError(CheckpointError, PermissionError):
    """A read-only `Checkpointer` was asked to write."""


class SaveFailedError(CheckpointError, OSError):
    """A save failed; a later load does not see any part of the checkpoint."""


class SaveCancelledError(CheckpointError, RuntimeError):
    """A save was cancelled before its commit, and saved nothing."""


class StoreError(CheckpointError, OSError):
    """An object store rejected a request, or did not answer in time."""


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """A save did not finish before the deadline; writing continues."""


class DatasetStateError(CheckpointError, TypeError):
    """A dataset iterator cannot return or restore its state."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """Leaves of the state cannot be saved, or restored into, because of their types.

    Attributes:
        leaves: Leaf path -> a description of the leaf found there.
    """

    def __init__(
        self,
        leaves: dict[str, str],
        advice: str = "",
        *,
        task: Literal["saved", "restored into"] = "saved",
    ) -> None:
        self.leaves = dict(leaves)
        other = (
            "save their parts: flaxckpt.register_leaf"
            if task == "saved"
            else "restore the state without them, and join both, as Equinox does:"
            " eqx.combine(load(path, eqx.filter(model, eqx.is_array)), model)"
        )
        advice = advice or (
            "Wanted arrays, numbers, strings, typed PRNG keys or None. Convert"
            " them, make them static fields: flax.struct.field(pytree_node=False), or"
            f" {other}."
        )
        super().__init__(
            f"{_count(leaves, 'leaf', 'leaves')} cannot be {task}:\n"
            + rows(f"{path}: found {found}" for path, found in leaves.items())
            + f"\n{advice}"
        )


class PartitionError(CheckpointError, ValueError):
    """Partition rules or specs do not fit the state or the mesh.

    Attributes:
        leaves: Leaf path, or pattern -> the problem.
    """

    def __init__(self, leaves: dict[str, str]) -> None:
        self.leaves = dict(leaves)
        super().__init__(
            f"{_count(leaves, 'partition spec', 'partition specs')} cannot be used:\n"
            + rows(f"{leaf}: {problem}" for leaf, problem in leaves.items())
            + '\nChange rules or leaf_rules. End with (".*", P()) to replicate others.'
        )


class LeafNameError(CheckpointError, ValueError):
    """Leaf names collide on disk, or contain characters the store rejects.

    Attributes:
        names: The invalid names -> the reason.
    """

    def __init__(self, names: dict[str, str], advice: str) -> None:
        self.names = dict(names)
        super().__init__(
            f"{_count(names, 'leaf name', 'leaf names')} cannot be stored:\n"
            + rows(f"{name}: {reason}" for name, reason in names.items())
            + f"\n{advice}"
        )


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A leaf with different properties in a state and in a checkpoint.

    Attributes:
        leaf: The leaf path, `params/Dense_0/kernel`.
        wanted: The leaf that the state expects, or its absence.
        found: The leaf that the checkpoint holds.
        kind: The disagreement: the leaf `differs`, is `missing` in the checkpoint or
            `unused` by the state, `several` stored leaves would fit, it is `too_wide`
            for jax as it is configured, or `unsupported`: not read in the form in
            which it is stored.
        advice: A sentence that says what to do, if this depends on the format.
    """

    leaf: str
    wanted: str
    found: str
    kind: Literal[
        "differs", "missing", "unused", "several", "too_wide", "unsupported"
    ] = field(default="differs", compare=False, repr=False)
    advice: str = field(default="", compare=False, repr=False)

    @property
    def row(self) -> str:
        """The line that shows the mismatch in an error."""
        return f"{name_leaf(self.leaf)}: wanted {self.wanted}, found {self.found}"


class RestoreMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the abstract state; `mismatches` lists every leaf.

    Attributes:
        path: The checkpoint.
        mismatches: All leaves that do not match, in the order of the state.
    """

    def __init__(
        self,
        path: str,
        mismatches: Sequence[Mismatch],
        advice: str = "",
        *,
        shown: Sequence[str] | None = None,
    ) -> None:
        self.path = path
        self.mismatches = tuple(mismatches)
        if shown is None:  # else `shown` describes the mismatches in fewer lines
            shown = [mismatch.row for mismatch in mismatches]
        super().__init__(
            f"{_count(mismatches, 'leaf', 'leaves')} of {path}"
            f" {'does' if len(mismatches) == 1 else 'do'} not fit the state:\n"
            + rows(shown)
            + f"\n{advice or 'Change the state to fit the checkpoint.'}"
        )


class ResumeMismatchError(CheckpointError, ValueError):
    """A run resumed from a checkpoint would differ from the uninterrupted run.

    Attributes:
        mismatches: All leaves that differ after one step.
    """

    def __init__(self, how: str, mismatches: Sequence[Mismatch], advice: str) -> None:
        self.mismatches = tuple(mismatches)
        super().__init__(
            f"{_count(mismatches, 'leaf differs', 'leaves differ')} {how}:\n"
            + rows(mismatch.row for mismatch in mismatches)
            + f"\n{advice}"
        )


def name_leaf(path: str) -> str:
    """Returns a leaf path as shown: the empty path is `(root)`."""
    return path or "(root)"


def rows(lines: object, count: int | None = None) -> str:
    """Returns the first few `lines`, indented, and the number of lines left out.

    Args:
        lines: The lines; at least as many as are shown. One that begins with a colon is
            about the leaf with the empty path.
        count: The number of all lines, if `lines` are only the first of them.
    """
    listed = list(lines)  # type: ignore[call-overload]
    shown = [
        f"  {printable(name_leaf('') + line if line.startswith(': ') else line)}"
        for line in listed[:ROWS_SHOWN]
    ]
    left_out = (len(listed) if count is None else count) - len(shown)
    if left_out:
        shown.append(f"  … and {left_out} more (in the error's fields)")
    return "\n".join(shown)


def one_or_rows(faults: Sequence[str]) -> str:
    """Returns a single fault of a leaf as it is, and several as `rows`, counted."""
    if len(faults) == 1:
        return printable(faults[0])
    return f"{len(faults)} leaves:\n{rows(faults)}"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Returns the first `most` names, joined by commas, with an ellipsis if cut."""
    shown = ", ".join(map(name_leaf, names[:most]))
    return shown + (", …" if len(names) > most else "")


def one_line(text: object, max_chars: int = 300) -> str:
    """Returns a text or the message of an error on one line, cut to `max_chars`."""
    return " ".join(str(text).split())[:max_chars]


def join_rows(text: object) -> str:
    """Returns a text or the message of an error, its rows joined by semicolons."""
    head, *rows = str(text).splitlines() or [""]
    return " ".join(filter(None, (head, "; ".join(map(str.strip, rows)))))


def printable(text: str) -> str:
    """Returns `text` on a single line, shortened, with control characters escaped.

    Names read from a checkpoint are untrusted.
    """
    short = text if len(text) <= _LONGEST_ROW else f"{text[:_LONGEST_ROW]} …"
    if short.isprintable():
        return short
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in short
    )


def _count(items: object, one: str, many: str) -> str:
    n = len(items)  # type: ignore[arg-type]
    return f"{n} {one if n == 1 else many}"
