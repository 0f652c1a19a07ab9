"""Every error that flaxckpt raises on purpose.

    CheckpointError
    ├── CheckpointNotFoundError   (FileNotFoundError)  nothing at that path or step
    ├── CheckpointExistsError     (FileExistsError)    the step or path is taken
    ├── CheckpointFormatError     (ValueError)         not a checkpoint we can read
    ├── DamagedCheckpointError    (OSError)            a checkpoint, but not intact
    ├── RestoreMismatchError      (ValueError)         it does not fit the state
    ├── ResumeMismatchError       (ValueError)         a run would not go on as it was
    ├── PartitionError            (ValueError)         specs that cannot be
    ├── UnsupportedLeafError      (TypeError)          a leaf that cannot be saved
    ├── LeafNameError             (ValueError)         leaf names collide or are unsafe
    ├── DatasetStateError         (TypeError)          an iterator without usable state
    ├── OptionError               (ValueError)         arguments that make no sense
    ├── ReadOnlyError             (PermissionError)    writing through a reader
    ├── SaveFailedError           (OSError)            the bytes could not be written
    ├── StoreError                (OSError)            an object store failed
    └── CheckpointTimeoutError    (TimeoutError)       waited long enough

Each is also the builtin that a caller would expect, and carries its facts as
attributes, so that nothing has to parse a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
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
    "PartitionError",
    "ReadOnlyError",
    "RestoreMismatchError",
    "ResumeMismatchError",
    "SaveFailedError",
    "StoreError",
    "UnsupportedLeafError",
]

ROWS_SHOWN = 8
_LONGEST_ROW = 2000


class CheckpointError(Exception):
    """The root of all flaxckpt errors."""

    def __str__(self) -> str:
        return "\n".join(map(printable, super().__str__().split("\n")))


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this path, or no such step."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A committed checkpoint is already there."""


class CheckpointFormatError(CheckpointError, ValueError):
    """The path holds something, but no checkpoint in a format that is read here."""


class DamagedCheckpointError(CheckpointError, OSError):
    """Parts of a checkpoint are missing or fail their checksum."""


class OptionError(CheckpointError, ValueError):
    """An argument has a value that makes no sense."""


class ReadOnlyError(CheckpointError, PermissionError):
    """A read-only `Checkpointer` was asked to write."""


class SaveFailedError(CheckpointError, OSError):
    """A save could not be completed; nothing of it counts as saved."""


class StoreError(CheckpointError, OSError):
    """An object store refused, or did not answer in time."""


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """A save did not finish within the time allowed; it is still running."""


class DatasetStateError(CheckpointError, TypeError):
    """A dataset iterator cannot give its state, or cannot take the saved one."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """The state has leaves of types that no checkpoint can hold.

    Attributes:
        leaves: Leaf path -> what was found there.
    """

    def __init__(self, leaves: dict[str, str], advice: str = "") -> None:
        self.leaves = dict(leaves)
        advice = advice or (
            "Wanted arrays, numbers, strings, typed PRNG keys or None. Convert"
            " them, or make them static fields: flax.struct.field(pytree_node=False)."
        )
        super().__init__(
            f"{_count(leaves, 'leaf', 'leaves')} cannot be saved:\n"
            + rows(
                f"{path or '(root)'}: found {found}" for path, found in leaves.items()
            )
            + f"\n{advice}"
        )


class PartitionError(CheckpointError, ValueError):
    """Partition rules or specs that do not fit the state or the mesh.

    Attributes:
        leaves: Leaf path, or pattern -> what is wrong.
    """

    def __init__(self, leaves: dict[str, str]) -> None:
        self.leaves = dict(leaves)
        super().__init__(
            f"{_count(leaves, 'partition spec', 'partition specs')} cannot be:\n"
            + rows(f"{leaf}: {problem}" for leaf, problem in leaves.items())
            + '\nChange rules or leaf_rules; (".*", P()) last replicates the rest.'
        )


class LeafNameError(CheckpointError, ValueError):
    """Leaf names that collide on disk, or that the store cannot hold.

    Attributes:
        names: The names at fault, each with the reason.
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
    """One leaf on which a state and a checkpoint disagree.

    Attributes:
        leaf: The leaf path, `params/Dense_0/kernel`.
        wanted: What the state asks for, or what it lacks.
        found: What the checkpoint holds.
        kind: How they disagree: the leaf `differs`, is `missing` in the checkpoint or
            `unused` by the state, `several` stored leaves would fit, or it is
            `too_wide` for jax as it is configured.
    """

    leaf: str
    wanted: str
    found: str
    kind: Literal["differs", "missing", "unused", "several", "too_wide"] = field(
        default="differs", compare=False, repr=False
    )

    @property
    def row(self) -> str:
        """The line that shows the mismatch in an error."""
        return f"{self.leaf or '(root)'}: wanted {self.wanted}, found {self.found}"


class RestoreMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the abstract state; every leaf is in `mismatches`.

    Attributes:
        path: The checkpoint.
        mismatches: All leaves at fault, in the order of the state.
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
        if shown is None:  # else it says the same in fewer lines
            shown = [mismatch.row for mismatch in mismatches]
        super().__init__(
            f"{_count(mismatches, 'leaf', 'leaves')} of {path}"
            f" {'does' if len(mismatches) == 1 else 'do'} not fit the state:\n"
            + rows(shown)
            + f"\n{advice or 'Change the state that is passed to fit the checkpoint.'}"
        )


class ResumeMismatchError(CheckpointError, ValueError):
    """A run would not go on from a checkpoint as it would have without.

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


def rows(lines: object) -> str:
    """Indents the first few of `lines`, and says how many more there are."""
    listed = list(lines)  # type: ignore[call-overload]
    shown = [f"  {printable(line)}" for line in listed[:ROWS_SHOWN]]
    if len(listed) > ROWS_SHOWN:
        shown.append(f"  … and {len(listed) - ROWS_SHOWN} more (in the error's fields)")
    return "\n".join(shown)


def first_few(names: Sequence[str], most: int = 5) -> str:
    """The first `most` of `names` in one line, and an ellipsis if there are others."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def printable(text: str) -> str:
    """`text` in one line that no terminal takes for a command, and that has an end.

    Names in a checkpoint are whoever's who wrote it.
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
