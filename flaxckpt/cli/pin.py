"""`flaxckpt pin` and `flaxckpt unpin`."""

from __future__ import annotations

from typing import Annotated

from flaxckpt.cli import _app, _output
from flaxckpt.cli._parameters import Argument

_Steps = Annotated[list[int], Argument(metavar="STEP", is_step=True, help="The steps.")]


@_app.verb
def pin(
    path: _app.RunArgument,
    steps: _Steps,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Protects steps from all policies.

    Example:
      flaxckpt pin runs/7 2000
    """
    return _change(path, steps, step_format, json, pinned=True)


@_app.verb
def unpin(
    path: _app.RunArgument,
    steps: _Steps,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Removes the pins of steps.

    Example:
      flaxckpt unpin runs/7 2000
    """
    return _change(path, steps, step_format, json, pinned=False)


def _change(
    path: str, steps: list[int], step_format: str | None, json: bool, *, pinned: bool
) -> int:
    from flaxckpt import _inspect

    directory = _inspect.run_view.set_pinned(
        path, steps, pinned=pinned, step_format=step_format
    )
    if json:
        _output.print_document({"path": directory, "steps": steps, "pinned": pinned})
    else:
        verb = "pinned" if pinned else "unpinned"
        noun = "step" if len(steps) == 1 else "steps"
        numbers = ", ".join(map(str, steps))
        path = _output.shorten_path(directory)
        _output.print_line(f"{verb} {noun} {numbers} of {path}")
    return _app.SUCCESS
