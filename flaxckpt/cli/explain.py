"""`flaxckpt explain`."""

from __future__ import annotations

from flaxckpt.cli import _app, _output, _policies
from flaxckpt.cli._output import Cell, TextColumn


@_app.verb
def explain(
    path: _app.RunArgument,
    keep: _policies.KeepOption = None,
    config: _policies.ConfigOption = None,
    group: _policies.GroupOption = None,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Shows the reasons to keep each step.

    A run directory does not record its policies: pass them as --keep or --config.
    Exits with 1 if a step is known to be damaged.

    Example:
      flaxckpt explain runs/7 --keep latest:3 --keep every:1000
    """
    from flaxckpt import _inspect, _steps, _storage

    policies = _policies.parse_policies(keep, config, group)
    root = _storage.paths.resolve(path)
    view = _inspect.run_view.survey(root, step_format)
    reasons = view.explain(policies)
    code = _app.FINDING if view.has_damage else _app.SUCCESS
    if json:
        _output.print_document(reasons)
        return code
    rows: list[list[str | Cell]] = [
        [
            str(step),
            ", ".join(why) if why else Cell("nothing: would be deleted", "yellow"),
        ]
        for step, why in reasons.items()
    ]
    _output.print_table(
        [TextColumn("step", is_number=True), TextColumn("kept by")], rows
    )
    for event in reversed(_steps.journal.recent(root / _steps.journal.NAME)):
        if event.kind == "scheduled":
            _output.print_line(f"saves: {event.details.get('reason')}")
            break
    if not reasons:
        _output.print_line(f"{_output.shorten_path(str(root))} has no steps yet")
    return code
