"""What is done while something fails, and what must be true afterwards.

What is done is logged outside of the directory: before it is begun, and when it was
acknowledged. A state verifies itself: every element is a function of step, leaf and
index.
"""

import json
import logging
import os
import re
import stat
from pathlib import Path
from types import MappingProxyType

import numpy as np

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import BestN, LatestN

NEXT = 1000  # the step that is saved when all is over
RAW = flaxckpt.ArrayLayout()
ENCODED = flaxckpt.ArrayLayout(codec="zstd")


def values(step, leaf, shape, dtype, version):
    seed = step * 1_000_003 + leaf * 101 + version * 10_007
    numbers = np.arange(np.prod(shape), dtype=np.uint64) * 2_654_435_761 + seed
    return (numbers % 127).astype(dtype).reshape(shape)


def state(step, version=0):
    """What is saved as a step; a version of it replaces another."""
    return {
        "w": values(step, 0, (9, 5), np.float32, version),
        "large": values(step, 2, (1200, 250), np.float32, version),
        "frozen": values(0, 3, (5000,), np.uint8, 0),
        "count": step,
        "name": f"step {step}, version {version}",
    }


ITEMS = {"model": ("w", "large"), "opt": ("frozen", "count"), "extra": ("name",)}


def in_items(state):
    """The leaves of a state in three branches, for steps of three items."""
    return {
        item: {name: state[name] for name in names} for item, names in ITEMS.items()
    }


def is_state(found, step, version):
    wanted = state(step, version)
    if "model" in found:  # without an item that may have been deleted
        wanted = in_items(wanted)
        wanted = {item: wanted[item] for item in (found.keys() | {"model", "extra"})}
    return json_like(found) == json_like(wanted)


def json_like(tree):
    """A tree with its arrays as types, shapes and bytes."""
    if isinstance(tree, dict):
        return {key: json_like(value) for key, value in sorted(tree.items())}
    if isinstance(tree, np.ndarray):
        return str(tree.dtype), tree.shape, tree.tobytes()
    return type(tree).__name__, tree


def batches(step):
    found = StepIndexed(lambda i: i)
    for _ in range(step):
        next(found)
    return found


class Log:
    """What was begun and what was acknowledged, in a file elsewhere."""

    def __init__(self, path, note=lambda text: None):
        self._path = path
        self._note = note

    def __call__(self, *row):
        text = json.dumps(row)
        self._note(text)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, text.encode() + b"\n")
        os.close(descriptor)

    @staticmethod
    def read(path):
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


def save(ckpt, log, step, *, version=0, goes=(), metrics=None, shape=dict, **options):
    """Saves a step and waits; steps in `goes` may be deleted by policies."""
    log("saving", step, version)
    for other in goes:
        log("deleting", other)
    if metrics:
        log("measuring", step, metrics)
    ckpt.save(step, shape(state(step, version)), metrics=metrics, **options).wait()
    log("saved", step, version)
    if metrics:
        log("measured", step, metrics)


# ---- what is done ------------------------------------------------------------------


def make_directories(directory):
    """Makes the steps of a run directories of chunk files, as of old."""
    from tests.helpers import old_stores  # only where it is needed

    for manifest in directory.glob("*/flaxckpt.json"):
        old_stores.make_directories(manifest.parent)


class Scenario:
    """What is there before, and what is done while something fails."""

    options = MappingProxyType({"layout": RAW})
    shape = staticmethod(dict)

    def open(self, directory, **more):
        return flaxckpt.Checkpointer(directory, **self.options, **more)

    def prepare(self, directory, log):
        with self.open(directory) as ckpt:
            save(ckpt, log, 1)

    def act(self, directory, log):
        with self.open(directory) as ckpt:
            self.do(ckpt, log)

    def do(self, ckpt, log):
        raise NotImplementedError


class FirstSave(Scenario):
    def prepare(self, directory, log):
        pass

    def do(self, ckpt, log):
        save(ckpt, log, 1)


class NewStep(Scenario):
    """A step with all that belongs to it, linked in part, after another."""

    def do(self, ckpt, log):
        save(ckpt, log, 2, metrics={"loss": 0.5}, dataset=batches(2))


class OverDirectories(NewStep):
    """A step after one of an old release, in directories of chunk files."""

    def prepare(self, directory, log):
        super().prepare(directory, log)
        make_directories(directory)


class Encoded(NewStep):
    options = MappingProxyType({"layout": ENCODED})


class Permissions(NewStep):
    """A step whose files have modes of their own, other than the umask's."""

    options = MappingProxyType({"layout": RAW, "permissions": 0o705})


class Retention(Scenario):
    """A new step, for which an old one goes."""

    options = MappingProxyType({"layout": RAW, "keep": [LatestN(2)]})

    def prepare(self, directory, log):
        with self.open(directory) as ckpt:
            for step in (1, 2):
                save(ckpt, log, step)

    def do(self, ckpt, log):
        save(ckpt, log, 3, goes=[1])


class RetentionOfOne(Retention):
    options = MappingProxyType({"layout": RAW, "keep": [LatestN(1)]})

    def prepare(self, directory, log):
        with self.open(directory) as ckpt:
            save(ckpt, log, 1)

    def do(self, ckpt, log):
        save(ckpt, log, 2, goes=[1])


class DatasetsLetGo(Scenario):
    """A new step, for which the dataset state of an old one goes."""

    options = MappingProxyType({"layout": RAW, "keep_dataset": [LatestN(1)]})

    def prepare(self, directory, log):
        with self.open(directory) as ckpt:
            save(ckpt, log, 1, dataset=batches(1))

    def do(self, ckpt, log):
        save(ckpt, log, 2, dataset=batches(2))


class Items(Scenario):
    """A new step of three items, a dataset, JSON and metrics, after another."""

    options = MappingProxyType(
        {"layout": RAW, "items": tuple(ITEMS), "dataset_item": "iter"}
    )
    shape = staticmethod(in_items)

    def prepare(self, directory, log):
        self._save(directory, log, 1)

    def act(self, directory, log):
        self._save(directory, log, 2)

    def _save(self, directory, log, step):
        with self.open(directory) as ckpt:
            save(
                ckpt,
                log,
                step,
                shape=in_items,
                metrics={"loss": 1 / step},
                dataset=batches(step),
                json={"config": {"step": step}},
            )


class ItemsEncoded(Items):
    options = MappingProxyType({**Items.options, "layout": ENCODED})


class ItemsLetGo(Items):
    """A new step, for which an item of an old one goes."""

    options = MappingProxyType({**Items.options, "keep_items": {"opt": [LatestN(1)]}})


class Overwrite(Scenario):
    def do(self, ckpt, log):
        save(ckpt, log, 1, version=1, on_exists="overwrite")


class OverwriteOfPinned(Scenario):
    options = MappingProxyType({"layout": RAW})

    def prepare(self, directory, log):
        super().prepare(directory, log)
        with self.open(directory) as ckpt:
            pin(ckpt, log, 1)

    def do(self, ckpt, log):
        save(ckpt, log, 1, version=1, on_exists="overwrite")


class Delete(Scenario):
    def prepare(self, directory, log):
        with self.open(directory) as ckpt:
            for step in (1, 2):
                save(ckpt, log, step, dataset=batches(step))

    def do(self, ckpt, log):
        log("deleting", 1)
        ckpt.delete(1)
        log("deleted", 1)


class AddMetrics(Scenario):
    """Metrics where none were, and then in place of others."""

    def do(self, ckpt, log):
        for loss in (0.5, 0.25):
            log("measuring", 1, {"loss": loss})
            ckpt.add_metrics(1, {"loss": loss})
            log("measured", 1, {"loss": loss})


class Pins(Scenario):
    def do(self, ckpt, log):
        pin(ckpt, log, 1)
        log("unpinning", 1)
        ckpt.unpin(1)
        log("unpinned", 1)
        pin(ckpt, log, 1)


def pin(ckpt, log, step):
    log("pinning", step)
    ckpt.pin(step)
    log("pinned", step)


class Prune(Scenario):
    def prepare(self, directory, log):
        with self.open(directory) as ckpt:
            for step in (1, 2, 3):
                save(ckpt, log, step, metrics={"loss": 1 / step})
            pin(ckpt, log, 1)

    def act(self, directory, log):
        with self.open(directory, keep=[BestN(1, "loss", "min")]) as ckpt:
            log("deleting", 2)
            if 2 in ckpt.prune():
                log("deleted", 2)


class Temporary(Scenario):
    """A temporary step that is made permanent, and another that goes."""

    def prepare(self, directory, log):
        with self.open(directory) as ckpt:
            save(ckpt, log, 1, temporary=True)

    def do(self, ckpt, log):
        ckpt.save(1, state(1), on_exists="skip").wait()
        save(ckpt, log, 2, temporary=True)
        save(ckpt, log, 3, goes=[2])


def with_optimizer(params):
    return {**params, "opt_state": {"mu": np.zeros(3)}}


class ParamsOnly(Scenario):
    def prepare(self, directory, log):
        with self.open(directory) as ckpt:
            save(ckpt, log, 1)
            ckpt.save_params_only(1, with_optimizer(state(1)))
            log("aside", 1)

    def do(self, ckpt, log):
        log("putting aside", 2)
        ckpt.save_params_only(2, with_optimizer(state(2)))
        log("aside", 2)


class Leases(Scenario):
    """A reader of new steps, and a deletion of one that it has let go."""

    def prepare(self, directory, log):
        with self.open(directory) as ckpt:
            for step in (1, 2):
                save(ckpt, log, step)

    def do(self, ckpt, log):
        for step in ckpt.new_steps(timeout_secs=0, poll_secs=0):
            assert is_state(ckpt.restore(step=step), step, 0)
        log("deleting", 1)
        ckpt.delete(1)
        log("deleted", 1)


class RunMetadata(Scenario):
    def act(self, directory, log):
        for name in ("a", "b"):
            with self.open(directory, metadata={"name": name}) as ckpt:
                log("named", name)
                assert ckpt.run_metadata == {"name": name}


class JustEnds(Scenario):
    """A program that never waits; its exit code is the acknowledgement."""

    def act(self, directory, log):
        log("saving", 2, 0)
        self.open(directory).save(2, state(2))


class Bare(Scenario):
    """A checkpoint that is no step: written twice, the second time in its place."""

    def act(self, directory, log):
        for version in (0, 1):
            log("saving", 2, version)
            flaxckpt.save(
                directory / "2", state(2, version), layout=RAW, overwrite=True
            )
            log("saved", 2, version)


class Trials(Scenario):
    """What is tried out before a run begins; nothing of it may stay."""

    def do(self, ckpt, log):
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=9, save_last=False)
        on_step(2, state(2))
        on_step.check_resume({"count": 1}, dict)


class Endless(Scenario):
    """Saves, one after another, until it is killed."""

    options = MappingProxyType({"layout": RAW, "keep": [LatestN(2)]})

    def do(self, ckpt, log):
        while True:
            steps = ckpt.steps()
            step = steps[-1] + 1
            save(ckpt, log, step, goes=steps[:-1], metrics={"loss": 1 / step})


class Careless(NewStep):
    """A save by a program that never syncs: it must be found out."""

    def act(self, directory, log):
        os.fsync = lambda descriptor: None
        super().act(directory, log)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        FirstSave,
        NewStep,
        OverDirectories,
        Encoded,
        Permissions,
        Retention,
        RetentionOfOne,
        DatasetsLetGo,
        Items,
        ItemsEncoded,
        ItemsLetGo,
        Overwrite,
        OverwriteOfPinned,
        Delete,
        AddMetrics,
        Pins,
        Prune,
        Temporary,
        ParamsOnly,
        Leases,
        RunMetadata,
        JustEnds,
        Bare,
        Trials,
    )
}


# ---- what is read ------------------------------------------------------------------


class Warnings(logging.Handler):
    """What was warned of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.told = []
        logging.getLogger("flaxckpt").addHandler(self)

    def emit(self, record):
        self.told.append(record.getMessage())


class Reads(Scenario):
    """Two steps, of which the newest is restored, by the same run."""

    memory_map = False

    def prepare(self, directory, log):
        with self.open(directory) as ckpt:
            for step in (1, 2):
                save(ckpt, log, step, metrics={"loss": 0.5}, dataset=batches(step))

    def do(self, ckpt, log):
        warnings, found = Warnings(), batches(0)
        restored = ckpt.restore(memory_map=self.memory_map, dataset=found)
        assert is_state(restored, ckpt.restored_step, 0)
        assert found.get_state() == batches(ckpt.restored_step).get_state()
        is_told = any("step 2 is left out: " in text for text in warnings.told)
        assert ckpt.restored_step == (1 if is_told else 2), warnings.told
        log("restored", ckpt.restored_step)


class ReadsMapped(Reads):
    memory_map = True


class ReadsDirectories(Reads):
    def prepare(self, directory, log):
        super().prepare(directory, log)
        make_directories(directory)


class ReadsEncoded(Reads):
    options = MappingProxyType({"layout": ENCODED})


class Loads(Reads):
    """The newest step, by somebody who has no run."""

    def act(self, directory, log):
        warnings = Warnings()
        step = flaxckpt.metadata(directory).step
        restored = flaxckpt.load(directory)
        found = restored["count"]
        assert is_state(restored, found, 0)
        is_told = any("newer step is left out" in text for text in warnings.told)
        assert is_told or (step, found) == (2, 2), warnings.told
        log("restored", found)


class Verifies(Reads):
    """What is good is never called damaged, only unread."""

    def do(self, ckpt, log):
        for step in (1, 2):
            report = ckpt.verify(step)
            assert not report.problems, str(report)
            log("restored", step if report.ok else 0)


class VerifiesDirectories(Verifies):
    def prepare(self, directory, log):
        super().prepare(directory, log)
        make_directories(directory)


class Looks(Reads):
    """What is there, and how good it is: all of it, or an error."""

    def do(self, ckpt, log):
        assert ckpt.steps() == [1, 2]
        assert ckpt.latest_step() == 2
        assert ckpt.damaged() == {}
        assert ckpt.explain().keys() == {1, 2}
        assert ckpt.metadata(2).leaves.keys() == json_like(state(2)).keys()
        assert ckpt.metadata(2).has_dataset
        assert next(ckpt.new_steps(timeout_secs=0), None) in (1, 2, None)


READING = {
    scenario.__name__: scenario
    for scenario in (
        Reads,
        ReadsMapped,
        ReadsDirectories,
        ReadsEncoded,
        Loads,
        Verifies,
        VerifiesDirectories,
        Looks,
    )
}


# ---- what must be true -------------------------------------------------------------


class Expected:
    """What a log says of the steps that are there."""

    def __init__(self, rows=()):
        self.steps = {}  # step -> versions that it may have
        self.required = set()
        self.metrics = {}  # step -> what may be measured
        self.pinned = {}  # step -> whether it may be pinned
        self.aside = [None]  # what may be saved as parameters alone
        for row in rows:
            self.add(*row)

    def add(self, kind, *row):
        getattr(self, f"_{kind.replace(' ', '_')}")(*row)

    def _saving(self, step, version):
        self.steps.setdefault(step, set()).add(version)
        self.metrics.setdefault(step, []).append({})

    def _saved(self, step, version):
        self.steps[step] = {version}
        self.required.add(step)

    def _deleting(self, step):
        self.required.discard(step)

    def _deleted(self, step):
        self.steps.pop(step)
        self.metrics.pop(step, None)
        self.pinned.pop(step, None)

    def _measuring(self, step, metrics):
        self.metrics[step].append(metrics)

    def _measured(self, step, metrics):
        self.metrics[step] = [metrics]

    def _pinning(self, step):
        self.pinned.setdefault(step, {False}).add(True)

    def _pinned(self, step):
        self.pinned[step] = {True}

    def _unpinning(self, step):
        self.pinned[step].add(False)

    def _unpinned(self, step):
        self.pinned[step] = {False}

    def _putting_aside(self, step):
        self.aside.append(step)

    def _aside(self, step):
        self.aside = [step]

    def _named(self, name):
        pass

    def _restored(self, step):
        pass

    def _failed(self, text):
        pass

    def _unexpected(self, text):
        pass

    def _hits(self, count):
        pass

    def _seen(self, count):
        pass


def check(directory, rows):
    """What is wrong with a run directory, after what was logged; empty if nothing."""
    problems = []
    wanted = Expected(rows)
    if not directory.exists():
        return [f"step {step} is gone" for step in sorted(wanted.required)]
    reader = flaxckpt.Checkpointer(directory, read_only=True)
    listed = set(reader.steps())
    problems += [f"step {step} is gone" for step in sorted(wanted.required - listed)]
    problems += check_steps(reader, wanted)
    is_known = [set(), {"name"}]
    if listed and set(reader.run_metadata) not in is_known:
        problems.append(f"the run is called {reader.run_metadata}")
    aside = reader._session.saves.params_only.latest()
    if (aside and aside[0]) not in wanted.aside:
        problems.append(f"parameters of {aside}, not of {wanted.aside}")
    elif aside and not is_state(flaxckpt.load(aside[1]), aside[0], 0):
        problems.append("the parameters are not what was saved")
    return problems


def check_steps(reader, wanted, is_state=is_state):
    """What is wrong with the steps that a reader lists; empty if nothing."""
    problems = []
    for step in reader.steps():
        versions = wanted.steps.get(step, set())
        try:
            found = reader.restore(step=step)
            metrics = dict(reader.metrics(step))
            reader.metadata(step)
        except Exception as error:
            problems.append(f"step {step} is listed and cannot be read: {error!r:.300}")
            continue
        if not any(is_state(found, step, version) for version in versions):
            problems.append(f"step {step} is not what was saved")
        if metrics not in wanted.metrics.get(step, [{}]):
            problems.append(f"step {step} has the metrics {metrics}")
        pinned = (reader._session.run.path(step) / "PINNED").exists()
        if pinned not in wanted.pinned.get(step, {False}):
            problems.append(f"step {step} is {'' if pinned else 'not '}pinned")
    return problems


def check_next(directory, scenario):
    """What is wrong with a run directory that is worked with again."""
    problems = []
    age(directory)
    try:
        with scenario.open(directory) as ckpt:
            if mode := scenario.options.get("permissions"):
                problems += wrong_modes(directory, ckpt.steps(), mode)
            problems += [f"{path} is left" for path in leftovers(directory)]
            ckpt.save(NEXT, scenario.shape(state(NEXT))).wait()
            if not is_state(ckpt.restore(), NEXT, 0):
                problems.append("the next step is not what was saved")
    except errors.CheckpointError as error:
        problems.append(f"the next save does not work: {error!r:.300}")
    return problems


def wrong_modes(directory, steps, mode):
    """What has another mode than the steps were saved with."""
    wanted = {True: mode, False: mode & 0o666}
    for path in [path for step in steps for path in (directory / str(step)).rglob("*")]:
        found = stat.S_IMODE(path.stat().st_mode)
        if found != wanted[path.is_dir()]:
            yield f"{path} has the mode {found:o}"


def age(directory):
    """Lets the time pass after which small files count as left; not whole steps."""
    for path in directory.rglob("*"):
        if path.name.endswith((".tmp", "tmp-metrics")) or "READING" in path.name:
            os.utime(path, (0, 0))


_KNOWN = re.compile(
    r"(\d+|params_only)(/\d+)?"
    r"(/(state|dataset|metrics|model|opt|extra|iter|config)(/.*)?|/[A-Z_]+(\.opt)?"
    r"|/flaxckpt.json|/commit_success.txt)?"
    r"|events.jsonl|STAGING_OF|metadata(/_ROOT_METADATA)?"
)


def leftovers(directory):
    """What is there and belongs to nothing."""
    found = [path.relative_to(directory) for path in Path(directory).rglob("*")]
    return [
        str(path)
        for path in found
        if ".tmp" in path.name
        or "orbax-checkpoint-tmp" in path.name
        or not _KNOWN.fullmatch(str(path))
    ]
