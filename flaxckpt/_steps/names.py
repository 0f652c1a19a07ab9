"""The names of steps: formats, numbers and prefixes."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from flaxckpt import _storage, _util, errors

Number: TypeAlias = Callable[[str], int | None]
"""Returns the step of a name, or None."""

STAGING_OWNER = "STAGING_OF"
"""File in a staging directory that names its run directory."""

_FIELD = re.compile(r"\{step(?::0(\d+)d)?\}")

_NOT_IN_NAMES = "{}/\\\0"

_ANY_NAME = re.compile(r"(?:.*(?<![0-9]\.)(?<![0-9]))?([0-9]{1,18})", re.DOTALL)

_USUAL_PREFIX = re.compile(
    r"(?:checkpoint|ckpt|step)?[-_]?|checkpoint\.npz-|streaming_.*_", re.DOTALL
)

_T5X_TEMPORARY = re.compile(r"\.tmp-[0-9]+")
"""In the name of an unfinished step of T5X."""


@dataclass(frozen=True, slots=True)
class StepFormat:
    """Format of the names of step directories.

    Attributes:
        template: `{step}`, with a prefix (`step_{step}`) or padded with zeros
            (`{step:08d}`), or both.

    Source: Orbax's step name formats, `<prefix>_<step>` and a fixed length.
    """

    template: str = "{step}"

    def __post_init__(self) -> None:
        if not isinstance(self.template, str):
            raise errors.OptionError(
                "step_format must be a string such as 'step_{step}', got"
                f" {_util.arguments.describe(self.template)}"
            )
        fields = _FIELD.findall(self.template)
        rest = _FIELD.sub("", self.template)
        if len(fields) != 1 or any(char in rest for char in _NOT_IN_NAMES):
            raise errors.OptionError(
                "step_format must contain {step} or {step:08d} once, and no other"
                f" braces or slashes, got {self.template!r}; for example"
                " 'step_{step}'"
            )
        if is_temporary(_FIELD.sub("0", self.template)):
            raise errors.OptionError(
                "step_format must not give the names of unfinished steps, which ls and"
                f" load leave out, got {self.template!r}; for example 'step_{{step}}'"
            )

    def name(self, step: int) -> str:
        return self.template.format(step=step)

    def step(self, name: str) -> int | None:
        before, after = _affixes(self.template)
        digits = name.removeprefix(before).removesuffix(after)
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            return None
        return int(digits) if self.name(int(digits)) == name else None


@functools.cache
def _affixes(template: str) -> tuple[str, str]:
    """Returns the text before and after the number."""
    before, _, after = _FIELD.sub("\0", template).partition("\0")
    return before, after


def check(step: Any) -> int:
    """Returns `step` as an int; raises OptionError if it is no valid step."""
    try:
        number = operator.index(step)
    except Exception:  # arrays of other libraries may raise anything
        number = -1
    if isinstance(step, bool) or not 0 <= number < 10**18:
        raise errors.OptionError(
            "a step is the number of completed training steps, 0 or more, as an int,"
            f" got {_util.arguments.describe(step)}"
            + (_WAYS.get(step, "") if isinstance(step, str) else "")
        )
    return number


_WAYS = {
    **dict.fromkeys(
        ("latest", "last", "newest"),
        ": leave step out for the newest, or pass"
        " Checkpointer(directory).latest_step()",
    ),
    "best": ': pass Checkpointer(directory).best_step("loss", "min")',
}
"""Text passed as a step -> what to write instead."""


def number(name: str) -> int | None:
    match = _ANY_NAME.fullmatch(name)
    return int(match[1]) if match else None


def prefix(name: str) -> str:
    match = _ANY_NAME.fullmatch(name)
    return name[: match.start(1)] if match else name


def list_formats(name: str) -> list[StepFormat]:
    """Returns the formats that have a name: unpadded first, then padded."""
    start = prefix(name)
    is_refused = is_temporary(name) or any(char in start for char in _NOT_IN_NAMES)
    if number(name) is None or is_refused:
        return []
    width = len(name) - len(start)
    formats = (StepFormat(f"{start}{{step}}"), StepFormat(f"{start}{{step:0{width}d}}"))
    return [each for each in formats if each.step(name) is not None]


def is_usual_prefix(text: str) -> bool:
    return _USUAL_PREFIX.fullmatch(text) is not None


def is_usual(name: str) -> bool:
    return number(name) is not None and is_usual_prefix(prefix(name))


def usual_number(name: str) -> int | None:
    return number(name) if is_usual(name) else None


def is_temporary(name: str) -> bool:
    """Returns True for the name of an unfinished step, also of T5X."""
    is_ours = _storage.temporary.TEMPORARY in name
    return is_ours or _T5X_TEMPORARY.search(name) is not None


def find_format(steps: Mapping[int, str]) -> str | None:
    """Returns a format's template that all steps, number -> name, have, or None."""
    # The smallest number has the most leading zeros, if any.
    for step_format in list_formats(steps[min(steps)] if steps else "0"):
        if all(step_format.step(name) == step for step, name in steps.items()):
            return step_format.template
    return None
