"""Views and prunes a run directory from outside, by recorded or given rules."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flaxckpt import _checkpoint, _formats, _run, _steps, _storage, errors, policies
from flaxckpt._checkpoint.verify_report import VerifyReport
from flaxckpt._run.judge import Explained, Rules
from flaxckpt._run.run_steps import RunSteps
from flaxckpt._types import LeafPath, PathLike
from flaxckpt.policies import PreservationPolicy


@dataclass(frozen=True, slots=True)
class RunView:
    """The steps and former steps of a run, ascending, as seen from outside."""

    root: Path
    steps: Mapping[int, _run.run_index.RunStep]
    step_format: str | None = None

    @property
    def paths(self) -> dict[int, Path]:
        return {number: step.path for number, step in self.steps.items()}

    def rules(self, keep: Sequence[PreservationPolicy] | None = None) -> Rules | None:
        if keep is not None:
            return Rules(keep=policies.check(keep, "keep"))
        return _run.settings.read_rules(self.root, self.paths)

    def rankings(
        self, keep: Sequence[PreservationPolicy] | None = None
    ) -> dict[str, policies.BestN]:
        """Returns metric -> the policy of `rules` that ranks steps by it."""
        rules = self.rules(keep) or Rules()
        return {p.metric: p for p in rules.keep if isinstance(p, policies.BestN)}

    def explain(self, keep: Sequence[PreservationPolicy] | None = None) -> Explained:
        """Returns the reasons to keep each step, the known damage, and the best steps.

        Checks the files of the newest and the best only: of all would take seconds.
        """
        rules = self.rules(keep) or Rules()
        found = _run.judge.Judge(rules).explain(self.steps)
        marked = {n: why for n, why in found.damage.items() if n not in found.reasons}
        return found._replace(reasons=_run.judge.with_damage(found.reasons, marked))

    def check_metrics(self, rules: Rules) -> None:
        """Raises OptionError if no step has the metric of a policy."""
        counted = [step for step in self.steps.values() if step.is_counted]
        together = (rules.keep, *rules.keep_items.values())
        for policy, others in [(policy, keep) for keep in together for policy in keep]:
            if not isinstance(policy, policies.BestN) or not counted:
                continue
            if policies.WithoutMetric(policy.metric) in others:
                continue  # keeps all steps
            if policy.preserved(counted):
                continue
            raise errors.OptionError(
                f"no step of {self.root} has a finite metric {policy.metric!r}, so the"
                f" best step is unknown; {self.describe_metrics()}"
            )

    def describe_metrics(self) -> str:
        """Returns a clause with the names of the metrics that steps have."""
        names = errors.first_few(self.metric_names(), 8)
        return f"the steps have {names or 'no metrics'}"

    def metric_names(self) -> list[str]:
        steps = self.steps.values()
        return sorted({n for step in steps if step.is_counted for n in step.metrics})

    def checkpointer_format(self) -> str | None:
        """Returns the format of step names for a `Checkpointer`, or None."""
        if not all(path.is_dir() for path in self.paths.values()):
            return None
        if self.step_format is not None:
            return self.step_format
        return _steps.names.find_format({n: p.name for n, p in self.paths.items()})


def survey(root: Path, step_format: str | None = None) -> RunView:
    """Finds the steps of a run; raises OptionError for a single checkpoint.

    The format of step names is by default a usual one, or the one recorded by the run.
    """
    if not root.is_dir() or _formats.recognises(root):
        _formats.detect(root)
        raise errors.OptionError(
            f"{root} is a checkpoint, not a directory of steps: pass its parent"
        )
    steps = _run.run_index.read(root, step_format)
    if not steps and not _formats.has_only_begun(root):
        if step_format is None:
            _formats.detect(root)  # raises
        raise errors.CheckpointNotFoundError(
            f"{root} has no steps named like {step_format!r}: check the directory"
            " and the format"
        )
    return RunView(root, steps, step_format)


def numbers(path: PathLike, step_format: str | None = None) -> list[int]:
    """Returns the numbers of a run's steps and doubtful steps, ascending."""
    return list(survey(_storage.paths.resolve(path), step_format).paths)


def find_marked_damage(path: Path) -> str | None:
    """Returns the reason in the marker of a damaged step, or None."""
    marked = _steps.markers.is_damaged(path)
    return _steps.markers.damage_reason(path) if marked else None


def find_known_damage(path: Path, step: int | None = None) -> str | None:
    """Returns the known damage of a checkpoint, or what its files lack, or None."""
    return find_marked_damage(path) or find_lost_files(path, step)


def find_lost_files(
    path: Path, step: int | None, leaves: Collection[LeafPath] | None = None
) -> str | None:
    """Returns what the files of a step lack, by names, sizes and descriptions, or None.

    Only the files of `leaves` are compared, by default all; none in an object store.
    """
    if _storage.of(path).costs_requests:
        return None
    return _checkpoint.completeness.look(path, step, leaves).loss


# ---- changes ----------------------------------------------------------------------


@contextlib.contextmanager
def _run_opened(
    path: PathLike, step_format: str | None, rules: Rules, *, read_only: bool
) -> Iterator[RunSteps]:
    """Opens the steps of a run of flaxckpt, or raises OptionError.

    Unless `read_only`, files left by crashes are removed.
    """
    root = _storage.paths.resolve(path)
    name = survey(root, step_format).checkpointer_format()
    if name is None:
        raise errors.OptionError(
            f"the steps of {root} are not directories with names such as 100, step_100"
            " or 00000100, all of one format: only such steps can be pinned and pruned."
            " If names are mixed, choose one format, as in --step-format 'step_{step}'"
        )
    # A `Checkpointer` can do more, but saves and restores need jax.
    run = RunSteps(root, rules, _steps.names.StepFormat(name), read_only=read_only)
    if not read_only:
        run.make_directory()
        run.tidy()
    with contextlib.closing(run.events):
        yield run


def update_marker(report: VerifyReport) -> None:
    """Marks a damaged step of a run, or unmarks a good one, and records it."""
    path = _storage.paths.resolve(report.path)
    events = _run.events.Stream(path.parent, path.parent / _steps.journal.NAME)
    with contextlib.closing(events):
        _run.damage.update_marker(path, report, events)


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of pruning or a dry run: deleted steps, and deleted items of others.

    Attributes:
        left: Steps that could not be deleted; the log has the reasons.
        bytes: The size of files that only deleted steps have; None in object stores.
        reasons: Step -> reasons to keep it, for all steps before pruning.
    """

    path: str
    dry_run: bool
    deleted: tuple[int, ...]
    left: tuple[int, ...]
    bytes: int | None
    reasons: Mapping[int, Sequence[str]]
    items: tuple[tuple[int, str], ...] = ()


def prune(
    path: PathLike,
    rules: Rules | None = None,
    *,
    dry_run: bool,
    step_format: str | None = None,
) -> Pruned:
    """Deletes the steps of a run that no policy keeps, or lists them.

    The rules are by default those of the run. Raises OptionError if there are no
    policies, or no step has the metric of one; SaveFailedError if the newest step is
    damaged.
    """
    root = _storage.paths.resolve(path)
    if rules is None:
        rules = _recorded_rules(root, step_format)
    if not (rules.keep or rules.keep_items):
        raise _no_policies(root, "keeps every step")
    with _run_opened(path, step_format, rules, read_only=dry_run) as run:
        reasons = run.explain_all()
        view = survey(run.directory, step_format)
        view.check_metrics(run.retention.rules)
        sizes = _own_sizes(view.paths, reasons)
        decision = run.retention.decide()
        deleted = tuple(decision.doomed) if dry_run else run.prune()
        freed = None if sizes is None else sum(sizes.get(s, 0) for s in deleted)
        left = tuple(step for step in decision.doomed if step not in deleted)
        items = tuple(decision.items)
        return Pruned(str(run.directory), dry_run, deleted, left, freed, reasons, items)


def _recorded_rules(root: Path, step_format: str | None) -> Rules:
    """Returns the rules that a run has recorded; raises OptionError without any."""
    rules = survey(root, step_format).rules()
    if rules is None:
        raise _no_policies(root, "has recorded no policies")
    return rules


def _no_policies(root: Path, why: str) -> errors.OptionError:
    return errors.OptionError(
        f"prune needs policies, and the run {root} {why}: pass --keep latest:3,"
        " --keep best:1:eval/loss:min, --keep every:1000, or the settings of the run as"
        " --config FILE"
    )


def _own_sizes(
    steps: Mapping[int, Path], reasons: Mapping[int, Sequence[str]]
) -> dict[int, int] | None:
    """Returns the bytes, if known, that deleting each step alone would free."""
    counted: set[_run.disk_usage.FileId] = set()
    sizes = {}
    for step in sorted(steps, key=lambda step: not reasons.get(step)):
        usage = _run.disk_usage.on_disk(steps[step], counted)
        if usage is None:
            return None
        sizes[step] = usage.own
    return sizes


def set_pinned(
    path: PathLike,
    steps: Sequence[int],
    *,
    pinned: bool,
    step_format: str | None = None,
) -> str:
    """Pins or unpins steps, all of them or none, and returns the run directory."""
    with _run_opened(path, step_format, Rules(), read_only=True) as run:
        for step in steps:
            run.path(step)  # raises if it does not exist
    with _run_opened(path, step_format, Rules(), read_only=False) as run:
        for step in steps:
            (run.pin if pinned else run.unpin)(step)
        return str(run.directory)
