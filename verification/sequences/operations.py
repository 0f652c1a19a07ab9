"""The operations of sequences, on a run with a staging directory.

All but `prune` and `upload` are done to the newest step, so that each meets what the
others have left. Uploads happen in `upload` only, as if the thread were late.
"""

import itertools
import os

import numpy as np
import pytest

import flaxckpt
from flaxckpt.policies import BestN
from tests.faults import frozen, scenarios
from tests.helpers import seams

OPERATIONS = (
    "save",
    "overwrite",
    "delete",
    "pin",
    "add_metrics",
    "prune",
    "upload",
    "verify",
    "reopen",
)
_OPTIONS = {"keep": [BestN(1, "loss", "min")]}


def all_sequences(longest):
    """All sequences of up to `longest` operations, the short ones first."""
    for length in range(1, longest + 1):
        yield from itertools.product(OPERATIONS, repeat=length)


def state(step, version=0):
    """What is saved; `frozen` is linked from step to step, as it does not change."""
    return {
        "w": scenarios.values(step, 0, (3, 5), np.float32, version),
        "frozen": scenarios.values(0, 1, (5000,), np.uint8, 0),
        "count": step,
        "name": f"step {step}, version {version}",
    }


def is_state(found, step, version):
    return scenarios.json_like(found) == scenarios.json_like(state(step, version))


def open_run(root, **more):
    """The run below a directory, as its program opens it."""
    return flaxckpt.Checkpointer(
        root / "run", staging=root / "staging", **_OPTIONS, **more
    )


def relocate(root):
    """Lets a copied staging directory belong to the run directory beside it."""
    (root / "staging" / "STAGING_OF").write_text(f"{root / 'run'}\n")


class Expected(scenarios.Expected):
    """What a log says, of runs whose policies delete steps.

    Attributes:
        versions: Step -> all versions that were ever begun.
        uploaded: Steps that the run directory has without the staging directory.
        may_retain: True if policies may be deleting now.
    """

    def __init__(self, rows=()):
        self.versions = {}
        self.uploaded = set()
        self.may_retain = False
        super().__init__(rows)

    def key(self):
        """What is equal if two logs say the same."""
        return repr(
            (
                *(sorted(self.steps.items()), sorted(self.required)),
                *(sorted(self.metrics.items()), sorted(self.pinned.items())),
                *(sorted(self.versions.items()), sorted(self.uploaded)),
                self.may_retain,
            )
        )

    def _saving(self, step, version):
        super()._saving(step, version)
        self.versions.setdefault(step, set()).add(version)

    def _deleting(self, step):
        super()._deleting(step)
        self.uploaded.discard(step)

    def _retaining(self):
        self.may_retain = True

    def _retained(self, steps):
        """Policies have left these steps, for good."""
        for step in self.steps.keys() - set(steps):
            self._deleting(step)
            self._deleted(step)
        self.may_retain = False

    def _uploaded(self, steps):
        self.uploaded = set(steps)

    def missing(self, listed):
        """The steps that should be among those that are listed."""
        return {
            step
            for step in self.required - set(listed)
            if not self.may_retain or self._must_stay(step, listed)
        }

    def _must_stay(self, step, listed):
        """True if no policy may delete a step: the newest, best and pinned stay."""
        if self.pinned.get(step) == {True} or step > max(listed, default=0):
            return True
        others = [
            metrics.get("loss", np.inf)
            for other in self.steps.keys() - {step}
            for metrics in self.metrics[other]
        ]
        own = [metrics.get("loss", np.inf) for metrics in self.metrics[step]]
        return max(own) < min(others, default=np.inf)


class Run:
    """A run in this process, and what was logged of it."""

    def __init__(self, root, log):
        self._root = root
        self._log = log
        self.expected = Expected()
        self.ckpt = None

    def log(self, *row):
        self.expected.add(*row)
        self._log(*row)

    def prepare(self):
        """Two uploaded steps, of which the older is the best."""
        with open_run(self._root) as self.ckpt:
            for _ in range(2):
                self.save()
        self.log("uploaded", [1, 2])

    def newest(self):
        return max(self.ckpt.steps(), default=None)

    # ---- operations -----------------------------------------------------------------

    def save(self):
        step = (self.newest() or 0) + 1
        self._save(step, {"loss": step})

    def overwrite(self):
        if step := self.newest():
            self._save(step, {}, on_exists="overwrite")

    def _save(self, step, metrics, **options):
        version = len(self.expected.versions.get(step, ()))
        self.log("retaining")
        frozen.set_second(100 * step + version)
        self.log("saving", step, version)
        self.log("measuring", step, metrics)
        saved = self.ckpt.save(step, state(step, version), metrics=metrics, **options)
        saved.wait()
        self.log("saved", step, version)
        self.log("measured", step, metrics)
        self._retained()

    def _retained(self):
        listed = self.ckpt.steps()
        assert not self.expected.missing(listed), (self.expected.required, listed)
        self.log("retained", listed)

    def save_carelessly(self):
        """Saves without syncing anything, which must be found out."""
        os.fsync = lambda descriptor: None
        self.save()

    def delete(self):
        if step := self.newest():
            self.log("deleting", step)
            self.ckpt.delete(step)
            self.log("deleted", step)

    def pin(self):
        if step := self.newest():
            scenarios.pin(self.ckpt, self.log, step)

    def add_metrics(self):
        if step := self.newest():
            metrics = {"loss": -step}
            self.log("measuring", step, metrics)
            self.ckpt.add_metrics(step, metrics)
            self.log("measured", step, metrics)

    def prune(self):
        self.log("retaining")
        self.ckpt.prune()
        self._retained()

    def upload(self):
        self.log("retaining")
        self.ckpt.wait_for_uploads()
        there = flaxckpt.Checkpointer(self._root / "run", read_only=True).steps()
        assert self.newest() in (None, *there)
        self.log("uploaded", there)
        self._retained()

    def verify(self):
        if step := self.newest():
            assert self.ckpt.verify(step).ok

    def reopen(self):
        """As after a kill: what was not closed is left as it is."""
        self.ckpt = open_run(self._root)


def perform(root, log, rows, sequence, began):
    """Does the operations of a sequence to the run below `root`; logs their ends."""
    frozen.start(began)
    seams.replace(pytest.MonkeyPatch(), "uploads.start", lambda self: None)
    run = Run(root, log)
    for row in rows:
        run.expected.add(*row)
    run.ckpt = open_run(root)
    for operation in sequence:
        frozen.restart_names(operation)
        log("begins", operation)
        getattr(run, operation)()


def prepare(root, log, began):
    frozen.start(began)
    frozen.restart_names("save")
    Run(root, log).prepare()


# ---- what must be true -------------------------------------------------------------


def check(root, wanted):
    """What is wrong with the run after a cut; empty if nothing."""
    reader = open_run(root, read_only=True)
    problems = [f"step {step} is gone" for step in wanted.missing(reader.steps())]
    problems += scenarios.check_steps(reader, wanted, is_state)
    problems += _check_directory(root, wanted)
    scenarios.age(root)
    try:
        problems += _check_next(root, wanted)
    except scenarios.errors.CheckpointError as error:
        problems.append(f"the run does not go on: {error!r:.300}")
    return problems


def _check_directory(root, wanted):
    """What is wrong with the run directory, without the staging directory."""
    reader = flaxckpt.Checkpointer(root / "run", read_only=True)
    listed = reader.steps()
    for step in (wanted.missing(listed) & wanted.uploaded) - set(listed):
        yield f"step {step} is gone from the run directory"
    for step in listed:
        versions = wanted.versions.get(step, ())
        try:
            found = reader.restore(step=step)
        except Exception as error:
            yield f"step {step} of the run directory cannot be read: {error!r:.300}"
        else:
            if not any(is_state(found, step, version) for version in versions):
                yield f"step {step} of the run directory is not what was saved"


def _check_next(root, wanted):
    """What is wrong when the run is opened again, and goes on."""
    wanted.add("retaining")
    with open_run(root) as ckpt:
        ckpt.wait_for_uploads()
        for step in wanted.missing(ckpt.steps()):
            yield f"step {step} is gone after the run was opened"
        yield from (f"{path} is left" for path in scenarios.leftovers(root / "run"))
        yield from (f"{path} is left" for path in scenarios.leftovers(root / "staging"))
        ckpt.save(scenarios.NEXT, state(scenarios.NEXT)).wait()
        if not is_state(ckpt.restore(), scenarios.NEXT, 0):
            yield "the next step is not what was saved"
    if not is_state(flaxckpt.load(root / "run"), scenarios.NEXT, 0):
        yield "the next step was not uploaded"
