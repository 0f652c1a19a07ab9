"""Which checkpoint a path means, and what is in it, arrays unread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flaxckpt import _flax, _steps, errors, formats
from flaxckpt._info import Stored


def locate(path: Path, step: int | None) -> tuple[Path, int | None]:
    """The checkpoint that `path` and `step` mean, and its number if it is a step."""
    if step is None and path.exists() and formats.recognises(path):
        return path, None
    if not path.is_dir():
        formats.detect(path)  # raises
    steps = _steps.find(path, formats.recognises)
    if step is not None:
        if step not in steps:
            raise errors.CheckpointNotFoundError(
                f"{path} has no step {step}: it has {summary(list(steps))}"
            )
        return steps[step], step
    if not steps:
        formats.detect(path)  # raises
    newest = max(steps)
    return steps[newest], newest


def summary(steps: list[int]) -> str:
    """A few words on which steps there are."""
    if not steps:
        return "no steps"
    shown = ", ".join(str(step) for step in steps[-5:])
    if len(steps) > 5:
        return f"{len(steps)} steps, the newest {shown}"
    return f"steps {shown}"


def read_stored(path: Path, step: int | None, types: Sequence[type] = ()) -> Stored:
    """Reads everything of a checkpoint but its arrays."""
    reader = formats.detect(path).reader
    return reader.read(path, step=step, resolve=_flax.resolver(types))
