"""The steps under a run directory: names, listing, pins, removal.

Listing reads names only: a directory is committed by being renamed to its name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flaxckpt import _storage, errors

_log = logging.getLogger(__name__)

TEMPORARY = ".orbax-checkpoint-tmp"
"""In the name of a directory: not committed, for Orbax as for us."""

PIN = "PINNED"
"""A file of this name keeps its step, whatever the policies say; T5X's convention."""

_T5X_TEMPORARY = re.compile(r"\.tmp-[0-9]+")
"""How T5X ends the name of a step that is not finished."""

_FIELD = re.compile(r"\{step(?::0(\d+)d)?\}")
_ANY_NAME = re.compile(r"(?:.*(?<![0-9]\.)(?<![0-9]))?([0-9]{1,18})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StepFormat:
    """How a step's directory is called.

    Attributes:
        template: `{step}`, with a prefix (`step_{step}`) or padded with zeros
            (`{step:08d}`), or both.

    Source: Orbax's step name formats, `<prefix>_<step>` and a fixed length.
    """

    template: str = "{step}"

    def __post_init__(self) -> None:
        fields = _FIELD.findall(self.template)
        rest = _FIELD.sub("", self.template)
        if len(fields) != 1 or any(char in rest for char in "{}/\\\0"):
            raise errors.OptionError(
                f"step_format must hold {{step}} or {{step:08d}} once and no '/', got"
                f" {self.template!r}; for example 'step_{{step}}'"
            )

    def name(self, step: int) -> str:
        """The directory of `step`."""
        return self.template.format(step=step)

    def step(self, name: str) -> int | None:
        """The step whose directory is called `name`; None if none is."""
        before, _, after = _FIELD.sub("\0", self.template).partition("\0")
        digits = name.removeprefix(before).removesuffix(after)
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            return None
        return int(digits) if self.name(int(digits)) == name else None


def check(step: int) -> int:
    """`step` as a plain int.

    Raises:
        OptionError: It is no whole number from 0.
    """
    try:
        number = step.__index__()
    except AttributeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number < 10**18:
        raise errors.OptionError(
            f"a step is the number of completed training steps, 0 or more, got {step!r}"
        )
    return number


def listed(root: Path, step_format: StepFormat) -> dict[int, Path]:
    """The committed steps under `root`, ascending.

    A directory that is empty is none: nothing of ours or Orbax's is ever committed
    empty.
    """
    try:
        names = list(_storage.directories(root))
    except FileNotFoundError:
        return {}
    found = {}
    for name in names:
        step = step_format.step(name)
        if step is not None and _has_content(root / name):
            found[step] = root / name
    return dict(sorted(found.items()))


def _has_content(path: Path) -> bool:
    """Whether there is anything in a directory; no if it was just deleted."""
    try:
        return any(path.iterdir())
    except FileNotFoundError:
        return False


def find(root: Path, is_checkpoint: Callable[[Path], bool]) -> dict[int, Path]:
    """The steps under `root`, however they are called, ascending.

    Args:
        root: A directory.
        is_checkpoint: Tells a step from what is merely called like one.

    Raises:
        CheckpointFormatError: Two of them are one step.
    """
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()):
        match = _ANY_NAME.fullmatch(path.name)
        if not match or TEMPORARY in path.name or path.is_symlink():
            continue
        if _T5X_TEMPORARY.search(path.name):
            continue
        if not is_checkpoint(path):
            continue
        step = int(match[1])
        if step in found:
            raise errors.CheckpointFormatError(
                f"{root} holds step {step} twice, as {found[step].name} and"
                f" {path.name}: pass the path of one of them"
            )
        found[step] = path
    return dict(sorted(found.items()))


def is_pinned(path: Path) -> bool:
    """Whether the step at `path` stays whatever the policies say."""
    return (path / PIN).is_file()


def pin(path: Path) -> None:
    """Keeps the step at `path` until it is unpinned."""
    _storage.replace(path / PIN, b"1\n")


def unpin(path: Path) -> None:
    """Leaves the step at `path` to the policies again."""
    (path / PIN).unlink(missing_ok=True)
    _storage.sync_directory(path)


def delete(path: Path) -> None:
    """Removes a step: first its name, durably, then its files."""
    aside = path.with_name(path.name + TEMPORARY + "-deleted")
    _storage.withdraw(path, aside)
    _storage.remove_tree(aside)
    _log.info("deleted %s", path)
