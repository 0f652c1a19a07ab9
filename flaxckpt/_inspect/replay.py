"""Repeats the training steps between checkpoints, and compares the results."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from flaxckpt import _state, _util, errors
from flaxckpt._inspect import bits, fingerprint
from flaxckpt._inspect.bits import BitDiff
from flaxckpt._inspect.fingerprint import Fingerprint
from flaxckpt._run.checkpointer import Checkpointer
from flaxckpt._transforms import mirrors
from flaxckpt._types import LeafPath, PathLike, PyTree
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)

_ROWS_PRINTED = 8

_BATCH = "batch"
"""Branch of the batch beside the leaves of the state, in the leaves of a step."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of repeating the steps of a run between two checkpoints.

    Attributes:
        run: The run directory.
        step_a: The step of the checkpoint that the repeat began from.
        step_b: The step of the last checkpoint.
        outcome: `equal` if every checkpoint was reproduced bit for bit. Otherwise, the
            steps before the first different checkpoint were repeated twice: `changed`
            if both repeats agree, so the run computed other values; `unstable` if they
            differ, so the computation is not deterministic, or this machine is faulty.
        compared: The steps of the compared checkpoints. All are equal, except the last
            one if the outcome is not `equal`.
        changed: Leaf path -> its difference in the last compared checkpoint,
            parameters before the optimizer.
        same: The number of equal leaves in the last compared checkpoint.
        unstable_step: The first step after which the repeats differ; None unless
            `unstable`.
        unstable: Paths of the leaves that differ after that step: leaves of the batch,
            below `batch/`, before those of the state.
    """

    run: str
    step_a: int
    step_b: int
    outcome: Literal["equal", "changed", "unstable"]
    compared: tuple[int, ...]
    changed: Mapping[LeafPath, BitDiff]
    same: int
    unstable_step: int | None = None
    unstable: tuple[LeafPath, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every checkpoint was reproduced bit for bit."""
        return self.outcome == "equal"

    @property
    def last_equal(self) -> int:
        """The last step that is known to be reproduced."""
        return [self.step_a, *self.compared][-1 if self.ok else -2]

    @property
    def first_different(self) -> int | None:
        """The step of the first checkpoint that was not reproduced, if any."""
        return None if self.ok else self.compared[-1]

    _repr_pretty_ = _util.card.show_printed

    def __str__(self) -> str:
        title = f"{self.run}: steps {self.step_a} to {self.step_b} repeated"
        if self.ok:
            count = _util.humanize.count(len(self.compared), "checkpoint")
            return f"{title}\n{count} reproduced bit for bit, {self.same} leaves each"
        leaves = _util.humanize.count(len(self.changed) + self.same, "leaf", "leaves")
        return "\n".join(
            [
                title,
                f"step {self.last_equal} is reproduced, step {self.first_different} is"
                f" not: {len(self.changed)} of {leaves} differ",
                *_util.humanize.rows(
                    [f"{path}: {change}" for path, change in self.changed.items()],
                    _ROWS_PRINTED,
                ),
                *self._diagnosis(),
            ]
        )

    def _diagnosis(self) -> list[str]:
        if self.outcome == "changed":
            return [
                "A second repeat agrees with the first: the run computed something else"
                f" between steps {self.last_equal} and {self.first_different},",
                "by faulty hardware, or by other code, data, devices or versions.",
            ]
        return [
            f"A second repeat differs from the first, from step {self.unstable_step}"
            " on, in:",
            *_util.humanize.rows(self.unstable, _ROWS_PRINTED),
            "The computation is not deterministic (random numbers of numpy, the time,",
            "kernels of a GPU), or this machine is faulty: try another one.",
        ]


@_util.guessed_names.explain
def replay(
    run: PathLike,
    step_a: int,
    step_b: int,
    train_step: Callable[..., Any],
    dataset: Any = None,
    *,
    abstract_state: PyTree | None = None,
    transforms: Iterable[Transform] = (),
) -> ReplayReport:
    """Repeats the training steps between two checkpoints, and compares all bits.

    Finds hardware that computes wrongly, and training that is not deterministic.
    Restores step `step_a`, repeats the steps, and compares the state with every
    checkpoint up to `step_b`. At the first difference, repeats the steps since the
    last equal checkpoint once more, and compares both repeats after each step.

    ```python
    report = flaxckpt.replay(
        "run", 1000, 2000, train_step, batches, abstract_state=state
    )
    print(report)
    ```

    Args:
        run: A run directory. It is not changed.
        step_a: The step to begin from.
        step_b: The last step, greater than `step_a`.
        train_step: A function `train_step(state, batch)` of one training step, as the
            run used it; `train_step(state)` without `dataset`. Returns the state, or
            `(state, …)`; a function that changes NNX objects in place may return
            anything. May donate the state.
        dataset: The iterator of the run, which saved its position at `step_a`. It is
            moved.
        abstract_state: The state of the run, as for `load`. By default the saved
            classes.
        transforms: Changes to apply to the checkpoints first, as for `load`: those
            that undo the transforms of the saves.

    Raises:
        CheckpointNotFoundError: The run lacks one of the steps.
        DatasetStateError: `step_a` has no state of a dataset, or the data end too
            early.
        OptionError: Invalid arguments, a result of `train_step` that is not such a
            state, or several processes.
        CheckpointError: See `load`.
    """
    _util.arguments.check_function("train_step", train_step, "of a state and a batch")
    _check_arguments(train_step, dataset)
    if _util.job.is_distributed():
        raise errors.OptionError(
            "replay works in a single process that has all devices of the mesh: start"
            " it without jax.distributed.initialize"
        )
    checkpointer = Checkpointer(run, read_only=True)
    steps = _choose_steps(checkpointer, step_a, step_b)
    training = _Training(
        checkpointer, train_step, dataset, abstract_state, tuple(transforms)
    )
    return _compare_steps(training, steps)


def _compare_steps(training: _Training, steps: list[int]) -> ReplayReport:
    """Repeats the steps, and compares the checkpoints at `steps` until one differs."""
    same, compared = 0, steps[1:]
    changed: Mapping[LeafPath, BitDiff] = {}
    trace: dict[int, _StepPrint] = {}
    state = training.restore(steps[0])
    for begin, end in itertools.pairwise(steps):
        for step, result, leaves in training.repeat(state, begin, end):
            state, trace[step] = result, leaves
        changed, same = training.compare(state, end)
        if changed:
            compared = steps[1 : steps.index(end) + 1]
            break
        _log.info("step %d of %s is reproduced", end, training.directory)
    outcome: Literal["equal", "changed", "unstable"] = "equal"
    unstable_step: int | None = None
    unstable: tuple[LeafPath, ...] = ()
    if changed:
        del state, result  # two states may not fit into the memory of the devices
        start = training.restart(steps, compared[-1])
        unstable_step, unstable = training.find_unstable(trace, start, compared[-1])
        outcome = "changed" if unstable_step is None else "unstable"
    return ReplayReport(
        run=training.directory,
        step_a=steps[0],
        step_b=steps[-1],
        outcome=outcome,
        compared=tuple(compared),
        changed=changed,
        same=same,
        unstable_step=unstable_step,
        unstable=unstable,
    )


def _check_arguments(train_step: Callable[..., Any], dataset: Any) -> None:
    """Raises OptionError if `train_step` takes no state, or no batch of a dataset."""
    if isinstance(dataset, list | tuple):
        raise errors.OptionError(
            "dataset must be one iterator of batches, got"
            f" {_util.arguments.describe(dataset)}"
        )
    given = ("state",) if dataset is None else ("state", "batch")
    try:
        inspect.signature(train_step).bind(*given)
    except ValueError:  # of a function in C, unknown
        return
    except TypeError as error:
        advice = "pass dataset=" if dataset is None else "pass no dataset"
        raise errors.OptionError(
            f"train_step is called as train_step({', '.join(given)}): {error};"
            f" {advice}, or a function of these arguments"
        ) from None


def _choose_steps(checkpointer: Checkpointer, step_a: int, step_b: int) -> list[int]:
    first = _util.arguments.check_int("step_a", step_a, least=0)
    last = _util.arguments.check_int("step_b", step_b, least=0)
    if last <= first:
        raise errors.OptionError(
            f"step_b must be greater than step_a, got {first} and {last}"
        )
    steps = checkpointer.steps()
    for step in (first, last):
        if step not in steps:
            raise errors.CheckpointNotFoundError(
                f"{checkpointer.directory} has no step {step}; its steps:"
                f" {errors.first_few([str(step) for step in steps], 20) or 'none'}"
            )
    return [step for step in steps if first <= step <= last]


class _StepPrint(NamedTuple):
    """The fingerprints of a step: of its batch, and of the state after it."""

    batch: Fingerprint
    state: Fingerprint

    def differences(self, other: _StepPrint) -> tuple[LeafPath, ...]:
        """Returns the paths of leaves that differ, those of the batch first."""
        batch = self.batch.differences(other.batch)
        return (*batch, *_parameters_first(self.state.differences(other.state)))


class _Training:
    """The training of a run, to be repeated from its checkpoints; see `replay`."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        train_step: Callable[..., Any],
        dataset: Any,
        abstract_state: PyTree | None,
        transforms: tuple[Transform, ...],
    ) -> None:
        self.directory = str(checkpointer.directory)
        self._checkpointer = checkpointer
        self._train_step = train_step
        self._dataset = dataset
        self._abstract_state = abstract_state
        self._transforms = transforms
        self._batches: Any = None
        self._take_state: Callable[[PyTree, Any], PyTree] | None = None

    def restore(self, step: int) -> PyTree:
        """Returns the state at a step; moves the dataset there."""
        state = self._checkpointer.restore(
            self._abstract_state,
            step=step,
            dataset=self._dataset,
            transforms=self._transforms,
        )
        # Loaders begin at the restored position when they are iterated.
        is_iterable = hasattr(self._dataset, "__iter__")
        self._batches = iter(self._dataset) if is_iterable else self._dataset
        return state

    def restart(self, steps: list[int], different: int) -> int:
        """Returns the last step before `different` that the data can restart from."""
        before = steps[: steps.index(different)]
        has_data = self._checkpointer.has_dataset
        if self._dataset is None:
            return before[-1]
        return max((step for step in before if has_data(step)), default=before[0])

    def repeat(
        self, state: PyTree, begin: int, end: int
    ) -> Iterator[tuple[int, PyTree, _StepPrint]]:
        """Yields each step after `begin` up to `end`, its state and its fingerprint."""
        for step in range(begin + 1, end + 1):
            batch = () if self._batches is None else (self._next_batch(step),)
            batch_print = fingerprint.take({_BATCH: batch})  # it may be donated
            state = self._call(state, *batch)
            yield step, state, _StepPrint(batch_print, fingerprint.take(state))

    def compare(
        self, state: PyTree, step: int
    ) -> tuple[Mapping[LeafPath, BitDiff], int]:
        """Returns the leaves that differ from a checkpoint, and the number of others.

        The checkpoint is restored to the memory of the host, as devices may have no
        space.
        """
        flat = _state.flax_state.flatten(state)
        computed = {path: leaf.source for path, leaf in flat.table.items()}
        template = flat.rebuild(
            {path: _on_host(value) for path, value in computed.items()}
        )
        restored = self._checkpointer.restore(
            template, step=step, transforms=self._transforms
        )
        table = _state.flax_state.flatten(restored).table
        differences = {
            path: bits.compare(computed[path], table[path].source)
            for path in _parameters_first(computed)
        }
        changed = {path: diff for path, diff in differences.items() if diff is not None}
        return changed, len(differences) - len(changed)

    def find_unstable(
        self, trace: Mapping[int, _StepPrint], begin: int, end: int
    ) -> tuple[int | None, tuple[LeafPath, ...]]:
        """Repeats steps once more; returns the first that differs, and its leaves."""
        for step, _, leaves in self.repeat(self.restore(begin), begin, end):
            if differing := leaves.differences(trace[step]):
                return step, differing
        return None, ()

    def _call(self, state: PyTree, *batch: Any) -> PyTree:
        if self._take_state is None:
            paths = _state.flax_state.leaves_by_path(state).keys()
            returned = self._train_step(state, *batch)
            self._take_state = _find_state(state, paths, returned)
        else:
            returned = self._train_step(state, *batch)
        return self._take_state(state, returned)

    def _next_batch(self, step: int) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            raise errors.DatasetStateError(
                f"the dataset has no batch for step {step}: pass the iterator that the"
                " run had, with as many batches"
            ) from None


def _find_state(
    given: PyTree, paths: Set[LeafPath], returned: Any
) -> Callable[[PyTree, Any], PyTree]:
    """Returns the function from a state and the result of a step to the next state.

    Raises OptionError if the result has no state like `given`, which had `paths`.
    """
    by_path = _state.flax_state.leaves_by_path
    take = _state.flax_state.locate_state(returned, paths)
    if take is not None and by_path(take(returned)).keys() >= paths:
        return lambda _, returned: take(returned)
    is_object = _state.nnx_objects.is_object
    is_changed = any(map(is_object, jax.tree.leaves(given, is_leaf=is_object)))
    if returned is None or is_changed:
        return lambda given, _: given
    raise errors.OptionError(
        "train_step must return a state with the leaves of the state that it is given,"
        f" or (state, …), got {_util.arguments.describe(returned)}; wanted the leaves"
        f" {errors.first_few(sorted(paths))}"
    )


def _parameters_first(paths: Iterable[LeafPath]) -> list[LeafPath]:
    return sorted(paths, key=mirrors.is_in_optimizer)


def _on_host(value: Any) -> Any:
    """Returns the abstract leaf of a jax array on the host; other values unchanged."""
    if not isinstance(value, jax.Array):
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=_host())


@functools.cache
def _host() -> SingleDeviceSharding | None:
    try:
        return SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return None
