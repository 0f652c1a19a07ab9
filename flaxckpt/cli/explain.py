"""`flaxckpt explain`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _policies
from flaxckpt.cli._output import Cell, TextColumn
from flaxckpt.cli._parameters import Argument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flaxckpt._inspect.history import Ranking, SavedStep, Verdict
    from flaxckpt._inspect.run_view import RunView
    from flaxckpt._run.judge import Explained, Rules
    from flaxckpt._steps.event import Event
    from flaxckpt.policies import BestN, PreservationPolicy


@_app.verb
def explain(
    path: _app.RunArgument,
    step: Annotated[
        int | None,
        Argument(
            metavar="STEP", is_step=True, help="A step that exists or was deleted."
        ),
    ] = None,
    keep: _policies.KeepOption = None,
    config: _policies.ConfigOption = None,
    group: _policies.GroupOption = None,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Shows the reasons to keep each step, or to delete a step.

    A run of flaxckpt records its policies; --keep or --config replace them.
    Checks the names and sizes of the files of the newest and the best steps; verify
    checks all.
    Exits with 1 if a step is known to be damaged.

    Example:
      flaxckpt explain runs/7
      flaxckpt explain runs/7 300
      flaxckpt explain runs/7 --keep latest:3 --keep every:1000
    """
    from flaxckpt import _inspect, _steps, _storage

    policies = _policies.parse_policies(keep, config, group)
    root = _storage.paths.resolve(path)
    view = _inspect.run_view.survey(root, step_format)
    if policies is not None and (rules := view.rules(policies)):
        view.check_metrics(rules)
    explained = view.explain(policies)
    reasons = explained.reasons
    code = _app.FINDING if explained.damage else _app.SUCCESS
    if step is not None:
        events = _steps.journal.read(root / _steps.journal.NAME)
        why = reasons.get(step, ())
        return _explain_step(view, step, why, view.rules(policies), events, json)
    if json:
        _output.print_document(reasons)
        return code
    _show(view, reasons, view.rules(policies))
    for line in _describe_lost_best(view, explained, policies):
        _output.print_paragraph(line)
    if reasons and policies is None:
        _show_settings(view.rules(), _steps.journal.recent(root / _steps.journal.NAME))
    return code


def _show(
    view: RunView, reasons: Mapping[int, Sequence[str]], rules: Rules | None
) -> None:
    """Prints the reasons to keep each step, those of best steps with the value."""
    if not reasons:
        _output.print_line(f"{_output.shorten_path(str(view.root))} has no steps yet")
        return
    rows: list[list[str | Cell]] = []
    for step, why in reasons.items():
        kept_by = [*why]
        for policy in [] if rules is None else _best_policies(rules, why):
            value = view.steps[step].metrics.get(policy.metric)
            kept_by[why.index(str(policy))] += f" with {_number(value)}"
        nothing = Cell("nothing: would be deleted", "yellow")
        rows.append([str(step), ", ".join(kept_by) or nothing])
    _output.print_table(
        [TextColumn("step", is_number=True), TextColumn("kept by")], rows
    )


def _describe_lost_best(
    view: RunView, explained: Explained, keep: Sequence[PreservationPolicy] | None
) -> list[str]:
    """Returns a line for each best step of which a better one is damaged or deleted.

    The policies `keep` are by default those that the run has recorded.
    """
    from flaxckpt import _inspect, _steps
    from flaxckpt._inspect import best_step

    ranked = view.rankings(keep)
    if not ranked:
        return []
    events = _steps.journal.read(view.root / _steps.journal.NAME)
    saved = _inspect.history.of_journal(events)
    gone = {number: saved[number].metrics for number in saved.keys() - view.paths}
    there = {number: step.metrics for number, step in view.steps.items()}
    counted = [number for number, step in view.steps.items() if step.is_counted]
    lines = []
    for name, policy in ranked.items():
        values = {
            number: value
            for number, metrics in (there | gone).items()
            if (value := metrics.get(name)) is not None and math.isfinite(value)
        }
        best = best_step.find(values, explained.damage, policy.mode, gone)
        clauses = best.describe_better(values, {}, counted)
        if best.good is not None and clauses:
            shown, end = _number(values[best.good]), best_step.end(policy.mode)
            text = f"best {name}: {shown}, {end}, at step {best.good}"
            lines.append("; ".join([text, *clauses]))
    return lines


def _show_settings(rules: Rules | None, events: Sequence[Event]) -> None:
    """Prints the recorded policies, and the last choice of the time between saves."""
    if rules is None:
        _output.print_paragraph(
            "the policies of the run are unknown: pass --keep or --config"
        )
    elif rules.keep:
        _output.print_paragraph(f"policies: {', '.join(map(str, rules.keep))}")
    else:
        _output.print_line("the run has no policies: every step stays")
    for event in reversed(events):
        if event.kind == "scheduled":
            _output.print_paragraph(f"saves: {event.details.get('reason')}")
            return


# ---- one step ---------------------------------------------------------------------


def _best_policies(rules: Rules, why: Sequence[str]) -> list[BestN]:
    """Returns the policies that keep a step, among the best of a metric."""
    from flaxckpt.policies import BestN

    return [
        policy
        for policy in rules.keep
        if isinstance(policy, BestN) and str(policy) in why
    ]


def _explain_step(
    view: RunView,
    number: int,
    why: Sequence[str],
    rules: Rules | None,
    events: Sequence[Event],
    json: bool,
) -> int:
    """Prints why a step stays or was deleted; returns the exit code."""
    from flaxckpt import _inspect

    listing = _inspect.listing.listing(view.root, step_format=view.step_format)
    steps = _inspect.history.of_events(events, listing)
    step = next((each for each in steps if each.step == number), None)
    if step is None:
        raise errors.CheckpointNotFoundError(
            f"{view.root} has no step {number}, and never had one by its journal;"
            f" {_describe_neighbours(number, [each.step for each in steps])}"
        )
    code = _app.SUCCESS if step.damage is None else _app.FINDING
    best = [] if rules is None else _best_policies(rules, why)
    verdicts = _inspect.history.explain_deletions(events, listing).get(number, ())
    places = [_inspect.history.rank(number, policy, steps) for policy in best]
    rankings = [place for place in places if place is not None]
    if json:
        _output.print_document(
            {
                **_output.fields_of(step),
                "kept_by": why,
                "rankings": rankings,
                "verdicts": verdicts,
            }
        )
        return code
    by_number = {each.step: each for each in steps}
    if rules is None and [*why] == ["no policy"]:
        why = ["the policies of the run, which are unknown: pass --keep"]
    for line in _tell(step, why, verdicts, by_number):
        _output.print_paragraph(line, "  ")
    for ranking in rankings:
        _output.print_paragraph(f"  {_describe_ranking(ranking, by_number)}")
    return code


def _describe_neighbours(number: int, steps: Sequence[int]) -> str:
    """Returns text with the steps just below and above a number."""
    from flaxckpt._formats import locate

    near = locate.list_nearest(steps, number)
    return f"the nearest steps are {near}" if near else "it has no steps"


def _describe_ranking(ranking: Ranking, steps: Mapping[int, SavedStep]) -> str:
    value = _number(ranking.value)
    if ranking.place == 1:
        text = f"{ranking.end} {ranking.metric}: {value}, of {ranking.count:,} saved"
    else:
        text = (
            f"{ranking.metric}: {value}, number {ranking.place} from the {ranking.end}"
            f" of {ranking.count:,} saved"
        )
    for number, better in ranking.better.items():
        text += f"; {_describe_better(steps[number], better)}"
    if ranking.next is not None:
        text += f"; next is step {ranking.next} with {_number(ranking.next_value)}"
    return text


def _describe_better(step: SavedStep, value: float) -> str:
    """Returns text on a better step, which may be damaged or deleted."""
    from flaxckpt._inspect import best_step

    if not step.exists:
        return best_step.describe_deleted(step.step, value)
    if step.damage is not None:
        is_counted = step.is_counted
        return best_step.describe_damaged(step.step, value, is_counted=is_counted)
    return f"better is step {step.step} with {_number(value)}"


def _tell(
    step: SavedStep,
    why: Sequence[str],
    verdicts: Sequence[Verdict],
    steps: Mapping[int, SavedStep],
) -> list[str]:
    saved = f"step {step.step} was saved {_output.when(step.saved) or 'at some time'}"
    if step.metrics:
        saved += f" with {_output.format_metrics(step.metrics)}"
    if step.deleted is None:
        if not why:
            return [saved, "nothing keeps it: the next save or prune deletes it"]
        if [*why] == ["no policy"]:
            return [saved, "it stays: no policy deletes steps"]
        if step.damage is not None:
            counted = "policies count it until flaxckpt verify --mark marks it"
            return [
                saved,
                f"it is damaged: {step.damage}",
                *([counted] if step.is_counted else []),
            ]
        return [saved, f"kept by {', '.join(why)}"]
    if step.deleted != step.deleted:  # NaN
        return [saved, "it is gone, and the journal does not say why"]
    lines = [saved, f"deleted {_output.when(step.deleted)}: {step.reason}"]
    for verdict in verdicts if step.reason == "no policy keeps it" else ():
        kept = [_with_metric(steps[number], verdict.metric) for number in verdict.kept]
        text = f"  {verdict.policy} kept {', '.join(kept) or 'none'}"
        if verdict.metric is not None:
            value = step.metrics.get(verdict.metric)
            text += f"; step {step.step} had {_number(value)}"
            kept_values = {steps[n].metrics.get(verdict.metric) for n in verdict.kept}
            if value is not None and value in kept_values:
                text += ", and the newer of equal steps is kept"
        lines.append(text)
    return lines


def _with_metric(step: SavedStep, metric: str | None) -> str:
    if metric is None:
        return str(step.step)
    return f"{step.step} ({_number(step.metrics.get(metric))})"


def _number(value: float | None) -> str:
    return "none" if value is None else _output.number(value)
