"""The steps under a run directory: what they are called, and which are there.

Listing reads names only: a directory is committed by being renamed to its name.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flaxckpt import _storage, _util, errors
from flaxckpt._steps import markers

_FIELD = re.compile(r"\{step(?::0(\d+)d)?\}")


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
    storage = _storage.of(root)
    try:
        contents = storage.contents(
            root, lambda name: step_format.step(name) is not None
        )
    except FileNotFoundError:
        return found
    steps = {step_format.step(name): name for name in contents}
    for step, name in sorted((s, n) for s, n in steps.items() if s is not None):
        content = contents[name]
        if content and storage.lists_committed(content, _PARTS_OF_ORBAX):
            found[markers.DAMAGED in content][step] = root / name
    return found


_PARTS_OF_ORBAX = ("state", "default", "_CHECKPOINT_METADATA", "_METADATA", "metrics")
