"""Verification of checkpoints in the background, one at a time, for all open pages.

The results are kept until the server ends. They are of the steps as listed when the
verification began: a step that has been replaced since counts as not verified.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _report, errors
from flaxckpt._inspect.listing import Step
from flaxckpt._report import Report, Verification
from flaxckpt._report.data import Integrity
from flaxckpt._ui.places import Place
from flaxckpt._util import progress

_log = logging.getLogger(__name__)

_MOST_RESULTS = 20_000
_MOST_FAULTS = 100


class Fault(NamedTuple):
    """A fault in a checkpoint.

    Attributes:
        place: The file, and the values in it.
        why: The fault.
    """

    place: str
    why: str


class Result(NamedTuple):
    """The result of reading every byte of a step.

    Attributes:
        step: The step, as listed before it was read.
        ended: The end of the verification, in seconds since 1970.
        integrity: The integrity of the step.
        summary: The number of leaves that cannot be read, and the files that cause it.
        faults: The first faults.
        more_faults: The number of further ones.
        unchecked: The number of leaves and files without checksums, which were only
            read.
        secs: The duration in seconds.
    """

    step: Step
    ended: float
    integrity: Integrity
    summary: str
    faults: tuple[Fault, ...]
    more_faults: int
    unchecked: int
    secs: float


class _StoppedError(Exception):
    """Ends a verification that is not wanted any more."""


class _Counter(progress.Counter):
    """A counter that ends the verification after `stop` was set."""

    def __init__(self, what: str, stop: threading.Event) -> None:
        super().__init__(what)
        self._stop = stop

    def add(self, size: int) -> None:
        """Adds `size`; raises if the verification is to stop."""
        if self._stop.is_set():
            raise _StoppedError
        super().add(size)


class Job:
    """The verification of some steps of a run, one after the other, on a thread.

    Attributes:
        place: The run or the checkpoint.
        steps: The steps, in the order in which they are read.
        results: The results so far, in this order.
        error: The error that ended the job, or None.

    Args:
        place: The run or the checkpoint.
        steps: The steps, at least one.
        remember: Called with each result.
    """

    def __init__(
        self, place: Place, steps: Sequence[Step], remember: Callable[[Result], None]
    ) -> None:
        self.place = place
        self.steps = tuple(steps)
        self.results: list[Result] = []
        self.error: str | None = None
        self._remember = remember
        self._stop = threading.Event()
        self._counter = progress.Counter("")
        self._thread = threading.Thread(
            target=self._run, name="flaxckpt ui verification", daemon=True
        )

    @property
    def is_running(self) -> bool:
        """True until the last step is verified, or the job has stopped."""
        return self._thread.is_alive()

    @property
    def is_stopped(self) -> bool:
        """True after `stop`, although a request to a store may still be running."""
        return self._stop.is_set()

    @property
    def current(self) -> tuple[Step | None, int, int]:
        """The step that is being read, the bytes read and its bytes; 0 if unknown."""
        n = len(self.results)
        step = self.steps[n] if n < len(self.steps) else None
        return step, self._counter.done, self._counter.total

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the job after the parts of files that are being read."""
        self._stop.set()

    def _run(self) -> None:
        try:
            for step in self.steps:
                if self._stop.is_set():
                    return
                self._counter = _Counter(f"verifying {step.path}", self._stop)
                start = time.monotonic()
                verified = _report.verify_step(step, self._counter)
                result = _describe(step, verified, time.monotonic() - start)
                self._remember(result)
                self.results.append(result)
        except _StoppedError:
            return
        except Exception as error:
            _log.exception("verifying %s failed", self.place.path)
            self.error = str(error) or type(error).__name__


def _describe(step: Step, verified: Verification, secs: float) -> Result:
    faults: list[Fault] = []
    summary, unchecked = "", 0
    if (report := verified.report) is not None:
        found = dict(report.problems)
        found |= {n: f"could not be read: {why}" for n, why in report.unread.items()}
        faults = [Fault(report.places.get(n, n), why) for n, why in found.items()]
        summary, unchecked = report.summary, len(report.unchecked)
    return Result(
        step,
        time.time(),
        verified.integrity,
        summary,
        tuple(faults[:_MOST_FAULTS]),
        len(faults[_MOST_FAULTS:]),
        unchecked,
        secs,
    )


class Verifications:
    """Verifies checkpoints, and remembers the results; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._results: collections.OrderedDict[tuple[Path, int | None], Result] = (
            collections.OrderedDict()
        )

    @property
    def job(self) -> Job | None:
        """The running verification, or the last one."""
        return self._job

    def start(self, place: Place, steps: Sequence[Step]) -> None:
        """Starts to verify steps of a run, in the order given.

        Raises:
            OptionError: There are no steps, or another verification is running.
        """
        if not steps:
            raise errors.OptionError(f"{place.name} has no step to verify")
        with self._lock:
            if self._job is not None and self._job.is_running:
                raise errors.OptionError(
                    f"{self._job.place.name} is being verified: wait for it, or stop it"
                )
            job = Job(place, steps, lambda result: self._remember(place, result))
            job.start()
            self._job = job

    def stop(self) -> None:
        """Stops the verification that is running, if any."""
        if self._job is not None:
            self._job.stop()

    def results(self, place: Place, report: Report) -> Mapping[int | None, Result]:
        """Returns the results for the steps of a report that were not replaced since.

        Returns:
            Step -> its last result.
        """
        with self._lock:
            found = {
                step.step: (step, result)
                for step in report.steps
                if (result := self._results.get((place.path, step.step))) is not None
            }
        return {
            number: result
            for number, (step, result) in found.items()
            if _is_same(step, result.step)
        }

    def update(self, place: Place, report: Report) -> Report:
        """Returns a report with the integrity that the verifications have found.

        Damage that the report knows stays, also if it was found by other means.
        """
        results = self.results(place, report)
        if not results:
            return report
        checks = [
            _merge(check, results[check.step].integrity)
            if check.step in results
            else check
            for check in report.integrity
        ]
        return report.with_integrity(checks)

    def _remember(self, place: Place, result: Result) -> None:
        key = (place.path, result.step.step)
        with self._lock:
            self._results[key] = result
            self._results.move_to_end(key)
            while len(self._results) > _MOST_RESULTS:
                self._results.popitem(last=False)


def _is_same(step: Step, verified: Step) -> bool:
    """Returns True unless the step was saved again after it was verified."""
    return (step.path, step.created) == (verified.path, verified.created)


def _merge(known: Integrity, found: Integrity) -> Integrity:
    """Returns the integrity that a verification has found, but damage that is known."""
    if not known.is_bad:
        return found
    return known._replace(bytes_checked=max(known.bytes_checked, found.bytes_checked))
