"""Lists the steps of a run of any library, with marks and reasons to keep them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from flaxckpt import _formats, _run, _storage, _util, errors
from flaxckpt._formats import locate
from flaxckpt._inspect import run_view, subtrees
from flaxckpt._inspect.subtrees import Subtree
from flaxckpt._types import PathLike
from flaxckpt.policies import PreservationPolicy

_Step = TypeVar("_Step")


@dataclass(frozen=True, slots=True)
class Step:
    """A checkpoint in a listing.

    Attributes:
        step: The step in a run directory; None for a checkpoint outside of a run.
        format: As `CheckpointMetadata.format`, or `unknown`.
        created: The start of the save, in seconds since 1970, or None.
        bytes: The size of its files; None in object stores.
        marks: Some of `latest`, `best`, `pinned`, `temporary`, `being read`, `damaged`.
        why: The reasons to keep it; empty if it would be deleted.
        is_counted: False for a step that policies leave out, marked as damaged or
            without a whole description.
    """

    step: int | None
    path: str
    format: str
    created: float | None
    bytes: int | None
    metrics: Mapping[str, float]
    marks: tuple[str, ...]
    why: tuple[str, ...]
    damage: str | None
    deleted_items: tuple[str, ...] = ()
    is_counted: bool = True


@dataclass(frozen=True, slots=True)
class Listing:
    """The checkpoints at a path, the oldest first.

    Attributes:
        bytes: The size of all their files, shared ones counted once; None in stores.
        keep: The policies, given or recorded by the run; None if unknown.
        best: Metric that a policy ranks steps by -> the best undamaged step.
        older: The number of older steps left out by `newest`.
    """

    path: str
    is_run: bool
    steps: tuple[Step, ...]
    bytes: int | None
    keep: tuple[PreservationPolicy, ...] | None = None
    best: Mapping[str, int] = dataclasses.field(default_factory=dict)
    older: int = 0

    @property
    def has_damage(self) -> bool:
        return any(step.damage is not None for step in self.steps)


def listing(
    path: PathLike,
    *,
    keep: Sequence[PreservationPolicy] | None = None,
    step_format: str | None = None,
    newest: int | None = None,
) -> Listing:
    """Lists the checkpoints at a path, or the `newest`, without reading arrays.

    Raises OptionError if no step has the metric of a policy in `keep`.
    """
    root = _formats.follow(_storage.paths.resolve(path))
    if step_format is None and root.exists() and _formats.recognises(root):
        usage = _run.disk_usage.on_disk(root, set())
        row = _run.run_index.read_alone(root)
        step = _describe(None, row, usage, damage=run_view.find_known_damage(root))
        return Listing(str(root), False, (step,), step.bytes)
    view = run_view.survey(root, step_format)
    rules = view.rules(keep)
    if keep is not None and rules is not None:
        view.check_metrics(rules)
    used = () if rules is None else rules.keep
    explained = view.explain(used)
    listed = [*view.steps.items()]
    older = 0 if newest is None else max(0, len(listed) - newest)
    counted: set[_run.disk_usage.FileId] = set()
    steps, total = [], 0
    for number, row in _shown(listed[older:], root):
        usage = _run.disk_usage.on_disk(row.path, counted)
        total += 0 if usage is None else usage.own
        step = _describe(
            number,
            row,
            usage,
            why=explained.reasons.get(number, []),
            is_best=number in explained.best.values(),
            damage=explained.damage.get(number),
        )
        steps.append(step)
    is_known = all(step.bytes is not None for step in steps)
    return Listing(
        str(root),
        True,
        _mark_newest(steps),
        total if is_known else None,
        None if rules is None else rules.keep,
        explained.best,
        older,
    )


def _shown(steps: Sequence[_Step], root: Path) -> Iterator[_Step]:
    """Yields steps, and shows a progress bar if this takes long."""
    counter = _util.progress.Counter(
        f"looking at {root.name}", of_bytes=False, total=len(steps)
    )
    with _util.progress.bar(counter):
        for step in steps:
            yield step
            counter.add(1)


# ---- one step ---------------------------------------------------------------------


def _describe(
    number: int | None,
    row: _run.run_index.RunStep,
    usage: _run.disk_usage.Usage | None,
    *,
    why: Sequence[str] = (),
    is_best: bool = False,
    damage: str | None = None,
) -> Step:
    marks = {
        "best": is_best,
        "pinned": row.markers.pinned,
        "temporary": row.temporary,
        "being read": bool(row.markers.readers),
        "damaged": damage is not None,
    }
    return Step(
        number,
        str(row.path),
        _format(row.path),
        row.find_created(),
        None if usage is None else usage.bytes,
        row.metrics,
        tuple(name for name, is_so in marks.items() if is_so),
        tuple(why),
        damage,
        tuple(sorted(row.markers.deleted_items)),
        row.is_counted,
    )


def _mark_newest(steps: Sequence[Step]) -> tuple[Step, ...]:
    good = [step for step in steps if step.damage is None]
    return tuple(
        dataclasses.replace(step, marks=("latest", *step.marks))
        if step in good[-1:]
        else step
        for step in steps
    )


def _format(path: Path) -> str:
    try:
        if (path / _formats.orbax_json.MANIFEST).is_file():
            return "flaxckpt"
        return _formats.detect(path).format
    except (errors.CheckpointError, PermissionError):
        return "unknown"


# ---- disk usage -------------------------------------------------------------------


class StepUsage(NamedTuple):
    """The bytes of a step, and its `own`, which no older step has; None in stores."""

    step: int | None
    bytes: int | None
    own: int | None


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """The disk usage of a run or checkpoint, the oldest step first.

    `bytes` count each file once, None in stores; `subtrees` are of the path `shown`.
    """

    path: str
    steps: tuple[StepUsage, ...]
    bytes: int | None
    shown: str | None
    subtrees: tuple[Subtree, ...]


def disk_usage(
    path: PathLike,
    *,
    step: int | None = None,
    depth: int = 2,
    step_format: str | None = None,
) -> DiskUsage:
    """Returns the disk usage, with the `subtrees` of a step, by default the newest."""
    root = _formats.follow(_storage.paths.resolve(path))
    paths: list[tuple[int | None, Path]] = [(None, root)]
    if step_format is not None or not (root.exists() and _formats.recognises(root)):
        paths = [*run_view.survey(root, step_format).paths.items()]
    counted: set[_run.disk_usage.FileId] = set()
    steps = tuple(
        StepUsage(number, *(_run.disk_usage.on_disk(path, counted) or (None, None)))
        for number, path in _shown(paths, root)
    )
    sizes = [step.own for step in steps]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    if not steps:
        return DiskUsage(str(root), steps, total, None, ())
    described = locate.read_metadata(root, step, step_format=step_format)
    trees = subtrees.subtrees(described.leaves)
    shown = [tree for tree in trees if tree.depth <= depth]
    return DiskUsage(str(root), steps, total, described.path, tuple(shown))
