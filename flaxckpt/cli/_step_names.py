"""Steps on the command line: a number, `latest`, `best`, or `best:METRIC`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from flaxckpt import errors

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]

    from flaxckpt._inspect.run_view import RunView
    from flaxckpt.policies import BestN

else:
    ParamType = click.ParamType  # of old versions without a parameter

FORMS = "a number, latest, best, or best:METRIC"

_LATEST = ("latest", "newest", "last")
_BEST = "best"
_MODES = ("min", "max")
_OF_SECOND = ("step_b", "target_step")
"""Parameters with a step of the second path."""


class StepName(str):
    """A word for a step that depends on the run."""

    __slots__ = ()


class StepType(ParamType):
    """Parses a step; `resolve_all` finds the number of a `StepName`."""

    name = "step"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | StepName:
        found = value if isinstance(value, int) else parse(str(value))
        if found is None:
            self.fail(f"must be {FORMS}, found {value!r}", param, ctx)
        return found


def parse(text: str) -> int | StepName | None:
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    is_name = text in _LATEST or text.partition(":")[0] == _BEST
    return StepName(text) if is_name else None


def find_path(params: Mapping[str, Any], name: str) -> str | None:
    """Returns the path of a command line that a parameter has a step of, or None."""
    named = ("path", "a", "src"), ("b", "target")
    first, second = (
        next((params[each] for each in names if params.get(each)), None)
        for names in named
    )
    return (name in _OF_SECOND and second) or first


def resolve_all(command: click.Command, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of parameters, with numbers instead of names of steps."""
    resolved = dict(values)
    for param in command.params:
        name = param.name or ""
        value = values.get(name)
        if isinstance(param.type, StepType) and value is not None:
            path, form = find_path(values, name) or "", values.get("step_format")
            resolved[name] = (
                [resolve(path, each, form) for each in value]
                if isinstance(value, list)
                else resolve(path, value, form)
            )
    return resolved


def resolve(path: str, step: int | StepName, step_format: str | None) -> int:
    """Returns the number of a step of a run.

    Raises OptionError if the path is a single checkpoint, or the best step is unknown;
    CheckpointError if the path is not a run directory with a step.
    """
    if not isinstance(step, StepName):
        return step
    if step in _LATEST:
        from flaxckpt._formats import locate

        newest = locate.locate(path, step_format=step_format).step
        if newest is None:
            raise errors.OptionError(
                f"{path} is a single checkpoint, without steps: leave {step} out"
            )
        return newest
    from flaxckpt import _inspect, _storage

    view = _inspect.run_view.survey(_storage.paths.resolve(path), step_format)
    policy = _find_ranking(view, step)
    best = view.explain([policy]).best.get(policy.metric)
    if best is None:
        raise errors.OptionError(
            f"no good step of {view.root} has a finite metric {policy.metric!r};"
            f" {view.describe_metrics()}"
        )
    return best


def _find_ranking(view: RunView, step: StepName) -> BestN:
    """Returns the policy that ranks steps as `best:METRIC:MODE` says.

    Raises:
        OptionError: The metric or the mode is neither given nor recorded by the run.
    """
    from flaxckpt.policies import BestN

    recorded = view.rankings()
    metric = step.partition(":")[2]
    name, _, mode = metric.rpartition(":")
    if name and mode in _MODES:
        return BestN(1, name, "min" if mode == "min" else "max")
    if metric in recorded:
        return recorded[metric]
    if not metric and len(recorded) == 1:
        [only] = recorded.values()
        return only
    if metric and metric not in view.metric_names():
        raise errors.OptionError(
            f"no step of {view.root} has a metric {metric!r}; {view.describe_metrics()}"
        )
    if metric:
        raise errors.OptionError(
            f"{view.root} does not record whether the lowest or the highest {metric} is"
            f" best: write best:{metric}:min or best:{metric}:max;"
            f" {view.describe_metrics()}"
        )
    if recorded:
        ranked = " or ".join(f"best:{name}" for name in recorded)
        raise errors.OptionError(
            f"{view.root} ranks its steps by several metrics: write {ranked}"
        )
    raise errors.OptionError(
        f"{view.root} records no metric that ranks its steps: write best:METRIC:min or"
        f" best:METRIC:max; {view.describe_metrics()}"
    )
