"""The steps under a run directory: what they are called, and which are there.

Listing reads names only: a directory is committed by being renamed to its name.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from flaxckpt import _storage, _util, errors
from flaxckpt._steps import markers

Number: TypeAlias = Callable[[str], int | None]
"""Returns the step that a name means; None if it means none."""

_FIELD = re.compile(r"\{step(?::0(\d+)d)?\}")

_ANY_NAME = re.compile(r"(?:.*(?<![0-9]\.)(?<![0-9]))?([0-9]{1,18})", re.DOTALL)

_USUAL_PREFIX = re.compile(
    r"(?:checkpoint|ckpt|step)?[-_]?|checkpoint\.npz-|streaming_.*_", re.DOTALL
)

_T5X_TEMPORARY = re.compile(r"\.tmp-[0-9]+")
"""How T5X ends the name of a step that is not finished."""


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
        if not isinstance(self.template, str):
            raise errors.OptionError(
                "step_format must be a text such as 'step_{step}', got"
                f" {_util.arguments.found(self.template)}"
            )
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


def check(step: Any) -> int:
    """`step` as a plain int.

    Args:
        step: An int, an integer of numpy, or an integer array without axes.

    Raises:
        OptionError: It is no whole number from 0.
    """
    try:
        number = operator.index(step)
    except Exception:  # whatever arrays of others say to that
        number = -1
    if isinstance(step, bool) or not 0 <= number < 10**18:
        raise errors.OptionError(
            "a step is the number of completed training steps, 0 or more, as an int,"
            f" got {_util.arguments.found(step)}"
        )
    return number


def number(name: str) -> int | None:
    """The number in which a name ends, as the names of steps do; None if none."""
    match = _ANY_NAME.fullmatch(name)
    return int(match[1]) if match else None


def prefix(name: str) -> str:
    """The part of a name before its final number."""
    match = _ANY_NAME.fullmatch(name)
    return name[: match.start(1)] if match else name


def is_usual_prefix(text: str) -> bool:
    """Whether the names of steps usually begin so."""
    return _USUAL_PREFIX.fullmatch(text) is not None


def is_usual(name: str) -> bool:
    """Whether steps are usually called so: `3`, `step_3`, `checkpoint_3`."""
    return number(name) is not None and is_usual_prefix(prefix(name))


def is_temporary(name: str) -> bool:
    """Whether T5X calls steps so that are not finished."""
    return _T5X_TEMPORARY.search(name) is not None


def listed(root: Path, step_format: StepFormat) -> dict[int, Path]:
    """The committed steps under `root` that are not marked as damaged, ascending.

    A directory that is empty is none: nothing of ours or Orbax's is ever committed
    empty.
    """
    with _storage.permissions.explained(root):
        return _told_apart(root, step_format)[0]


def damaged(root: Path, step_format: StepFormat) -> dict[int, Path]:
    """The steps under `root` that are marked as damaged, ascending."""
    with _storage.permissions.explained(root):
        return _told_apart(root, step_format)[1]


def _told_apart(
    root: Path, step_format: StepFormat
) -> tuple[dict[int, Path], dict[int, Path]]:
    """The steps under `root` that are not marked as damaged, and those that are."""
    found: tuple[dict[int, Path], dict[int, Path]] = {}, {}
    contents: dict[str, set[str]] = {}
    if _storage.paths.is_remote(root):
        contents = root.tree()
    try:
        names = sorted(contents or _storage.local.directories(root))
    except FileNotFoundError:
        return found
    steps = {step_format.step(name): root / name for name in names}
    for step in sorted(step for step in steps if step is not None):
        content = contents.get(steps[step].name) or _content(steps[step])
        if content and _counts(steps[step], content):
            found[markers.DAMAGED in content][step] = steps[step]
    return found


def _counts(path: Path, content: Collection[str]) -> bool:
    """Whether a checkpoint in a store has its marker; those of others need none."""
    if not _storage.paths.is_remote(path):
        return True
    if _storage.commit_marker.MARKER in content:
        return len(content) > 1  # it came late, and alone
    return not any(name in content for name in _PARTS_OF_ORBAX)


_PARTS_OF_ORBAX = ("state", "default", "_CHECKPOINT_METADATA", "_METADATA", "metrics")


def _content(path: Path) -> list[str]:
    """The names in a directory; none if it was just deleted."""
    try:
        return _storage.local.names(path)
    except FileNotFoundError:
        return []
