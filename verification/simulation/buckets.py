"""Histories of a run directory in a bucket: saves, deletions, readers, sweeps, pins.

The operations are those of flaxckpt's storage, on checkpoints of a few objects. The
ledger outside of all processes knows what was acknowledged, and checks the true content
of the bucket after every change.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from flaxckpt import _steps, _storage, errors
from flaxckpt._storage import commit_marker, leases, locks, transaction
from verification.simulation import kernel, store

URL = "memory://bucket"
RUN = f"{URL}/run"
MARKER = "commit_success.txt"
MANIFEST = "flaxckpt.json"
STEPS = (1, 2, 3)
TAKEN_OVER = "was taken over"
"""Part of the error of a writer that has lost its lock."""

READ_SECS = 60.0
"""Seconds after its last sign of life for which a reader is protected."""

is_status = _steps.markers.is_marker
LOCK = locks.LOCK
READING = leases.READING


def resolve() -> Any:
    """Returns the path of the run in the bucket."""
    return _storage.paths.resolve(RUN)


class Save:
    """A save of a step: what it writes, and under which lock.

    Attributes:
        concurrent: Deletions and replacements at the same time.
        lock: ID of the lock that the writer took.
    """

    def __init__(self, step: int, name: str, size: int) -> None:
        self.step = step
        self.name = name
        self.files = {f"state/part{i}": f"{name} {i}".encode() for i in range(size)}
        manifest = {file: _digest(content) for file, content in self.files.items()}
        self.files[MANIFEST] = json.dumps(manifest).encode()
        self.marker = json.dumps({MANIFEST: _digest(self.files[MANIFEST])}).encode()
        self.concurrent: set[Change] = set()
        self.lock = ""


class Change:
    """A deletion or a replacement of a step that is under way, or was."""

    def __init__(self, kind: str, step: int, process: kernel.Process) -> None:
        self.kind = kind
        self.step = step
        self.process = process
        self.has_ended = False

    @property
    def is_over(self) -> bool:
        """True if nobody works on it any more."""
        return self.has_ended or not self.process.is_alive


class Reading:
    """A read of a step, protected by a lease."""

    def __init__(self, step: int, lease: str, process: kernel.Process) -> None:
        self.step = step
        self.lease = lease
        self.process = process


class Ledger:
    """What was asked for and acknowledged; checks the bucket after every change.

    Args:
        world: The world.
        bucket: The bucket.

    Attributes:
        steps: The steps that are saved and deleted.
        is_calm: True if no process pauses, and all requests succeed.
        is_tidy: True if at most one process pauses for longer than its locks last, and
            does not crash: it removes what it has written after the end of its lock.
    """

    def __init__(self, world: kernel.World, bucket: store.Store) -> None:
        self.world = world
        self.bucket = bucket
        self.steps = STEPS[: world.random.choice((1, 1, 3))]
        self.saves: dict[bytes, Save] = {}  # by the content of the marker
        self.changes: list[Change] = []
        self.present: dict[int, Save] = {}  # acknowledged, and to be there
        self.readings: list[Reading] = []
        self.refreshed: dict[str, float] = {}
        self.late: set[bytes] = set()  # markers that came when others held the lock
        self.is_calm = False
        self.is_tidy = True
        bucket.on_change = self._check_change

    # ---- what processes report ----------------------------------------------------

    @contextlib.contextmanager
    def change(self, kind: str, step: int) -> Iterator[Change]:
        """Notes a deletion or replacement for the time of the `with` block."""
        process = self.world.task.process
        change = Change(kind, step, process)
        self.changes.append(change)
        self.present.pop(step, None)
        for save in self.saves.values():
            if save.step == step:
                save.concurrent.add(change)
        try:
            yield change
        finally:
            change.has_ended = True

    def begin_save(self, step: int) -> Save:
        """Makes the content of a new save."""
        name = f"{self.world.task.process.name}.{len(self.saves)}"
        save = Save(step, name, self.world.random.randint(1, 3))
        save.concurrent = {c for c in self.changes if c.step == step and not c.is_over}
        self.saves[save.marker] = save
        return save

    def acknowledge(self, save: Save, own: Change | None) -> None:
        """Notes that a save has succeeded: from now on, it is to be there."""
        self.world.record(f"acknowledged: {save.name} of step {save.step}")
        if not save.concurrent - {own}:
            self.present[save.step] = save
            self.check_present(save.step)

    # ---- invariants ---------------------------------------------------------------

    def objects(self, step: int) -> dict[str, bytes]:
        """Returns the objects of a step: name -> content."""
        prefix = f"run/{step}/"
        return {
            key.removeprefix(prefix): value
            for key, (value, _) in self.bucket.objects.items()
            if key.startswith(prefix)
        }

    def _check_change(self, key: str) -> None:
        _, number, name = [*key.split("/", 2), "", ""][:3]
        if number.isdigit() and name:
            step = int(number)
            if name.startswith(READING):
                if key in self.bucket.objects:
                    self.refreshed[key] = lease_time(self.world, self.bucket, key)
            elif not is_status(name):
                if name == MARKER:
                    self._note_marker(step)
                self.check_listed(step)
                self.check_present(step)
                self.check_readers(step, name)

    def _note_marker(self, step: int) -> None:
        """Notes whether a commit marker came late."""
        objects = self.objects(step)
        if (marker := objects.get(MARKER)) is not None:
            save = self.saves[marker]
            lock, _ = self.bucket.objects.get(f"run/{step}{LOCK}", (b"{}", b""))
            is_of_another = json.loads(lock).get("id") != save.lock
            if is_of_another or objects.get(MANIFEST) != save.files[MANIFEST]:
                self.late.add(marker)

    def check_listed(self, step: int) -> Save | None:
        """Checks that a listed step is whole and of one writer."""
        objects = self.objects(step)
        marker = objects.pop(MARKER, None)
        if marker is None or not objects:
            return None
        save = self.saves[marker]
        is_written = f"run/{step}{LOCK}" in self.bucket.objects
        does_fit = objects.get(MANIFEST) == save.files[MANIFEST]
        if marker in self.late and is_written and not does_fit:
            return None  # readers see that it does not fit
        for name, content in save.files.items():
            if objects.get(name) != content:
                raise kernel.Violation(
                    f"step {step} of {save.name} is listed, but {name} is"
                    f" {objects.get(name, b'missing').decode()!r:.60}"
                )
        return save

    def check_present(self, step: int) -> None:
        """Checks that an acknowledged step is there."""
        save = self.present.get(step)
        if save is not None and self.check_listed(step) is not save:
            raise kernel.Violation(
                f"step {step} of {save.name} was acknowledged, and is gone"
            )

    def check_readers(self, step: int, name: str) -> None:
        """Checks that no deletion removes a file under a reader."""
        if name in self.objects(step) or name == MARKER:
            return
        for reading in self.readings:
            is_alive = self.world.now - self.refreshed[reading.lease] <= READ_SECS
            is_alive |= self.is_calm and reading.process.is_alive
            is_replaced = any(
                c.kind == "replace" and c.step == step for c in self.changes
            )
            if reading.step == step and is_alive and not is_replaced:
                raise kernel.Violation(
                    f"{name} of step {step} is deleted under a reader"
                )

    def check_end(self) -> None:
        """Checks the bucket after all processes were restarted and have tidied up."""
        for step in STEPS:
            self.check_present(step)
            left = [name for name in self.objects(step) if not is_status(name)]
            is_late = left == [MARKER]  # does not count, and the next save removes it
            is_left = self.check_listed(step) is None and left and not is_late
            if is_left and self.is_tidy:
                raise kernel.Violation(f"step {step}: {left} are left for ever")
        if left := [key for key in self.bucket.objects if key.endswith(LOCK)]:
            raise kernel.Violation(f"{left} are left for ever")


def lease_time(world: kernel.World, bucket: store.Store, key: str) -> float:
    """Returns when a process began to write its lease, which may arrive late."""
    written = json.loads(bucket.objects[key][0])["time"]
    process = world.processes[int(key.split("-")[-2])]
    return written - kernel.EPOCH - process.clock_secs


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Program:
    """What one process does: operations of flaxckpt's storage in random order.

    Args:
        ledger: The ledger, which is told.
        size: The number of operations.
    """

    def __init__(self, ledger: Ledger, size: int) -> None:
        self._ledger = ledger
        self._world = ledger.world
        self._size = size

    def __call__(self) -> None:
        root = resolve()
        operations: tuple[tuple[Callable[[int], None], int], ...] = (
            (self.save, 5),
            (functools.partial(self.save, overwrite=True), 3),
            (self.delete, 4),
            (self.read, 3),
            (self.pin, 1),
            (self.tidy, 3),
        )
        some, weights = zip(*operations, strict=True)
        self._root = root
        random = self._world.random
        for _ in range(self._size):
            self._world.sleep(random.choice((0.0, 0.1, 1.0, 20.0)) * random.random())
            (operation,) = random.choices(some, weights)
            try:
                operation(random.choice(self._ledger.steps))
            except (errors.CheckpointError, FileNotFoundError) as error:
                self._world.record(f"{type(error).__name__}", f"{error}"[:90])
                if self._ledger.is_calm and TAKEN_OVER in str(error):
                    raise kernel.Violation(f"lost its lock: {error}") from error

    def save(self, step: int, *, overwrite: bool = False) -> None:
        """Saves a step, as `_checkpoint.commit` does."""
        final = self._root / str(step)
        storage = _storage.of(final)
        self._world.record(f"save {step}", f"{overwrite=}")
        is_there = storage.exists(final)
        if is_there and not overwrite and not transaction.is_unfinished(final):
            return
        with contextlib.ExitStack() as stack:
            change = None
            if overwrite:
                change = stack.enter_context(self._ledger.change("replace", step))
            save = self._ledger.begin_save(step)
            new = stack.enter_context(
                transaction.begin(
                    final, overwrite=overwrite, keep=_steps.markers.PIN.__eq__
                )
            )
            save.lock = commit_marker._locks[final]._holder.id
            pause = self._world.random.choice((0.0, 0.0, 0.0, 30.0))
            for name, content in save.files.items():
                self._world.sleep(pause * self._world.random.random())
                storage.write(new.directory / name, content)
            new.commit(save.marker)
        self._ledger.acknowledge(save, change)

    def delete(self, step: int) -> None:
        """Deletes a step, unless it is pinned."""
        path = self._root / str(step)
        self._world.record(f"delete {step}")
        if not transaction.is_committed(path):
            return
        with self._ledger.change("delete", step):
            _steps.delete.delete(path, find_foreign=lambda step: [])

    def pin(self, step: int) -> None:
        """Pins a step, or unpins it."""
        path = self._root / str(step)
        if not transaction.is_committed(path) or transaction.is_unfinished(path):
            return
        if _steps.markers.is_pinned(path):
            _steps.markers.unpin(path)
        else:
            _steps.markers.pin(path)

    def read(self, step: int) -> None:
        """Reads a step under a lease, as `new_steps` does."""
        path = self._root / str(step)
        if not transaction.is_committed(path):
            return
        lease = leases.Lease(path)
        process = self._world.task.process
        reading = Reading(step, (path / lease._name).key, process)
        try:
            is_there = not leases.is_being_deleted(path)
            if not (is_there and transaction.is_committed(path)):
                return
            self._ledger.readings.append(reading)
            self._world.record(f"reads step {step}")
            longest = self._world.random.choice((1.0, 60.0, 1000.0))
            self._world.sleep(longest * self._world.random.random())
        finally:
            if reading in self._ledger.readings:
                self._ledger.readings.remove(reading)
            lease.release()

    def tidy(self, step: int) -> None:
        """Removes leftovers; twice, as locks of other machines are watched first."""
        _tidy()
        self._world.sleep(self._world.random.choice((0.0, 60.0)))
        _tidy()


def _tidy() -> None:
    format_ = _steps.names.StepFormat("{step}")
    _steps.delete.tidy(resolve(), format_, ())


def _last_program(world: kernel.World) -> None:
    """Restarts a process after the faults, and lets it tidy up."""
    for _ in range(3):
        _tidy()
        world.sleep(400.0)
    _tidy()


def weather(world: kernel.World) -> store.Weather:
    """Draws the chances of faults: often none, else a few kinds at a time."""
    random = world.random
    if random.random() < 0.3:
        return store.Weather()
    faults = ("slow", "lost_request", "lost_answer", "late", "repeated", "fails")
    some = random.sample(faults, random.randint(1, 3))
    return store.Weather(**{name: random.choice((0.01, 0.03, 0.1)) for name in some})


def disturb(world: kernel.World, process: kernel.Process) -> None:
    """Draws what happens to a process: a crash, pauses, a wrong clock."""
    random = world.random
    process.clock_secs = random.uniform(-100, 100)
    if random.random() < 0.3:
        process.crash_after = random.randrange(150)
    for _ in range(random.choice((0, 0, 1, 2))):
        process.pauses[random.randrange(100)] = random.choice((10, 50, 100, 400))


def history(seed: int, *, is_traced: bool = False) -> list[kernel.Line]:
    """Runs one history; returns its timeline if traced.

    Raises:
        Violation: The history breaks a guarantee; its attribute `timeline` shows how.
    """
    with kernel.World(seed, is_traced=is_traced) as world:
        bucket = store.open_store(world, URL, weather(world))
        ledger = Ledger(world, bucket)
        random = world.random
        for index in range(random.randint(2, 4)):
            process = world.start(
                f"p{index}",
                Program(ledger, random.randint(1, 4)),
                machine=random.choice(("m1", "m2")),
                after=random.choice((0.0, 1.0, 30.0)) * random.random(),
            )
            disturb(world, process)
        bucket.draw_last_write(
            lambda process, secs: world.start(
                f"{process.name}'",
                Program(ledger, 2),
                machine=process.machine,
                after=secs,
            )
        )
        pauses = [process.pauses for process in world.processes.values()]
        ledger.is_calm = bucket.weather == store.Weather() and not any(pauses)
        paused = [
            process
            for process in world.processes.values()
            if max(process.pauses.values(), default=0) > 45
        ]
        has_crash = any(
            process.crash_after is not None or process.pid == bucket.dies_writing
            for process in paused
        )
        ledger.is_tidy = len(paused) < 2 and not has_crash
        world.run()
        bucket.weather = store.Weather()
        world.run_last(lambda: _last_program(world))
        ledger.check_end()
        return world.timeline


PATCHES = store.PATCHES
"""For `stand_ins.installed`."""
