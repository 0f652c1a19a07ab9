"""Histories of whole runs in a bucket: trainers, readers, a second job.

Each process uses a `Checkpointer`, with all that it does: saves on threads, retention,
restores, pins, metrics, and uploads from a local staging directory. The ledger outside
of all processes sees each change of an object, and checks it.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from verification.simulation import (
    buckets,
    databases,
    files,
    filesystem,
    kernel,
    programs,
    store,
)
from verification.simulation.programs import (
    Reader,
    Reading,
    Save,
    Setting,
    Trainer,
    reopen,
)

CONTEXTS = (filesystem.installed,)
"""What to enter before `stand_ins.installed`."""

PATCHES = store.PATCHES
"""For `stand_ins.installed`."""

_KEY = "run"
_MARKER = buckets.MARKER
_FILES = ("_CHECKPOINT_METADATA", buckets.MANIFEST)


class Purpose(NamedTuple):
    """What a process does when it sends a request.

    Attributes:
        pid: The process.
        thread: The name of the thread.
        doing: What the main thread does.
        since: Since when.
    """

    pid: int
    thread: str
    doing: str
    since: float


class Ledger(programs.Ledger):
    """What was asked for and acknowledged; checks each change of an object.

    Args:
        world: The world.
        bucket: The bucket.
        setting: What all processes agree on.
        disk: The file system with the staging directory.

    Attributes:
        is_calm: True if no process pauses, and all requests succeed.
        is_tidy: True if at most one process pauses for longer than its locks last, and
            does not crash: it removes what it has written after the end of its lock.
    """

    def __init__(
        self,
        world: kernel.World,
        bucket: store.Store,
        setting: Setting,
        disk: filesystem.FileSystem,
    ) -> None:
        super().__init__(world, setting)
        self.bucket = bucket
        self.disk = disk
        self.is_calm = False
        self.is_tidy = True
        self._listed: dict[int, int] = {}  # step -> save, as of the last change
        self._withdrawn: dict[int, Save] = {}  # by policies: step -> save
        self._late: set[bytes] = set()  # markers that came when others had the lock
        self._asked_to_delete: set[int] = set()
        bucket.on_change = self._see
        bucket.on_send = self._purpose
        disk.on_change = self._see_file

    @property
    def may_fail(self) -> bool:
        return not self.is_calm

    @property
    def may_restore_older(self) -> bool:
        return False

    def _purpose(self) -> Purpose:
        task = self.world.task
        pid = task.process.pid
        doing = self.doing.get(pid, "")
        return Purpose(pid, task.name, doing, self.began.get(pid, 0.0))

    @contextlib.contextmanager
    def operation(self, what: str, *, disturbs: bool = False) -> Iterator[None]:
        verb, _, step = what.partition(" ")
        if verb == "delete":
            self._asked_to_delete.add(int(step))
        with super().operation(what, disturbs=disturbs):
            yield

    # ---- the true content ---------------------------------------------------------

    def objects(self, step: int) -> dict[str, bytes]:
        """Returns the objects of a step: name -> content."""
        prefix = f"{_KEY}/{step}/"
        return {
            key.removeprefix(prefix): value
            for key, (value, _) in self.bucket.objects.items()
            if key.startswith(prefix)
        }

    def token(self, step: int) -> int | None:
        """Returns the save at a step; None without a step.

        Raises:
            Violation: There is a step, but it is not whole.
        """
        objects = self.objects(step)
        marker = objects.get(_MARKER)
        if marker is None or len(objects) == 1:
            return None
        fits = all(
            name in objects
            and f"sha256:{hashlib.sha256(objects[name]).hexdigest()}" == digest
            for name, digest in json.loads(marker).items()
        )
        is_written = f"{_KEY}/{step}{buckets.LOCK}" in self.bucket.objects
        if not fits and marker in self._late and is_written:
            return None  # readers see that it does not fit
        tokens = {_read_token(objects, name) for name in self.parts}
        missing = [name for name in _FILES if name not in objects]
        if not fits or len(tokens) > 1 or not tokens <= self.saves.keys() or missing:
            raise kernel.Violation(
                f"{step} is listed, but has parts of saves {tokens}, and lacks"
                f" {missing}; its marker {'fits' if fits else 'does not fit'}"
            )
        return tokens.pop()

    def _steps(self) -> list[int]:
        """Returns the numbers of all steps with objects, ascending."""
        parts = [key.split("/") for key in self.bucket.objects]
        return sorted({int(p[1]) for p in parts if len(p) > 2 and p[1].isdigit()})

    # ---- each change --------------------------------------------------------------

    def _see(self, key: str) -> None:
        _, number, name = [*key.split("/", 2), "", ""][:3]
        if not (number.isdigit() and name):
            return
        step = int(number)
        is_there = key in self.bucket.objects
        if name.startswith(buckets.READING):
            if is_there:
                self.touched[name] = buckets.lease_time(self.world, self.bucket, key)
                pid = int(name.rpartition("-")[0].rpartition("-")[2])
                self.leases[pid] = name
        elif name == "PINNED":
            self._see_pin(step, is_there=is_there)
        elif not buckets.is_status(name):
            self._see_object(step, name, is_there=is_there)

    def _see_file(self, name: str, paths: tuple[str, ...]) -> None:
        """Notes a pin in the staging directory."""
        path = Path(paths[-1])
        if name in ("rename", "replace") and path.name == "PINNED":
            self.last_pinned[self.world.task.process.pid] = path.parent

    def _see_pin(self, step: int, *, is_there: bool) -> None:
        if is_there:
            self.last_pinned[self.bucket.purpose.pid] = self.setting.run / str(step)
        elif self.bucket.purpose.doing.startswith("pin"):
            return  # of a step that was deleted meanwhile: the pin is refused
        elif (save := self._withdrawn.get(step)) is not None:
            raise kernel.Violation(f"policies delete {save}, which is pinned")
        else:
            # An overwrite that fails in a bucket removes the step, with its pin.
            self.pinned[self.setting.run / str(step)] = False

    def _see_object(self, step: int, name: str, *, is_there: bool) -> None:
        if name == _MARKER and is_there:
            self._note_late(step)
        run, token = self.setting.run, self.token(step)
        before = self._listed.pop(step, None)
        if token is not None:
            self._listed[step] = token
            self._withdrawn.pop(step, None)
            self.left.pop((run, token), None)
        if before is not None and before != token:
            self._see_departure(step, self.saves[before], is_removed=not is_there)
        if self.readings and not is_there and name != _MARKER:
            self._check_readers(step, name)

    def _note_late(self, step: int) -> None:
        """Notes a commit marker that arrives while another process has the lock."""
        objects = self.bucket.objects
        lock, _ = objects.get(f"{_KEY}/{step}{buckets.LOCK}", (b"{}", b""))
        if json.loads(lock).get("pid") != self.bucket.purpose.pid:
            self._late.add(objects[f"{_KEY}/{step}/{_MARKER}"][0])

    def _see_departure(self, step: int, save: Save, *, is_removed: bool) -> None:
        """Notes why a save is not listed any more."""
        purpose, run = self.bucket.purpose, self.setting.run
        is_deletion = "DELETING" in self.objects(step)
        # A deletion whose process died may have left its announcement.
        is_replaced = purpose.doing.endswith(f"of step {step}, overwriting")
        if (
            not is_removed
            or not is_deletion
            or is_replaced
            or self._is_replaced_near(save)
        ):
            self.left[run, save.token] = "replaced"
        elif purpose.thread == "main" and purpose.doing.startswith("delete"):
            self.left[run, save.token] = "deleted by a user"
        else:
            self.left[run, save.token] = "deleted by policies"
            self._withdrawn[step] = save
            self._check_policies(save, purpose)

    # ---- invariants ---------------------------------------------------------------

    def _check_policies(self, save: Save, purpose: Purpose) -> None:
        """Checks that policies may delete a step, which is not listed any more."""
        if self.disturbing or self.disturbed >= purpose.since:
            return
        newer = sum(step > save.step for step in self._listed)
        if newer < self.setting.latest or not self.setting.keep:
            raise kernel.Violation(
                f"policies delete {save}, with only {newer} newer steps:"
                f" {sorted(self._listed)}"
            )
        others = [self.saves[token].loss for token in self._listed.values()]
        if self.setting.has_best and save.loss < min(others):
            raise kernel.Violation(f"policies delete {save}, which is the best")

    def _check_readers(self, step: int, name: str) -> None:
        """Checks that no deletion removes an object under a reader."""
        for reading in self.readings:
            why = self.left.get((self.setting.run, reading.token), "")
            silent = self.world.now - self.touched[reading.lease]
            is_alive = self.is_calm or silent <= buckets.READ_SECS
            if reading.path.name == str(step) and is_alive and why != "replaced":
                raise kernel.Violation(f"{name} of {step} is removed under a reader")

    def check_there(self, save: Save) -> None:
        if save.directory == self.setting.staging and self._is_near(save):
            return
        if self.token(save.step) == save.token:
            if "DAMAGED" in self.objects(save.step):
                raise kernel.Violation(f"{save} is marked as damaged")
        elif not self._may_be_gone(save):
            raise kernel.Violation(f"{save} was acknowledged, and is gone")

    def _is_near(self, save: Save) -> bool:
        """Returns True if a save is in the staging directory."""
        with self.disk.observing():
            try:
                path = save.directory / str(save.step)
                return files.read_token(path, self.parts[0]) == save.token
            except (OSError, ValueError):
                return False

    def _may_be_gone(self, save: Save) -> bool:
        """Returns True for a save that was replaced or deleted."""
        if (self.setting.run, save.token) in self.left:
            return True
        return save.directory == self.setting.staging and (
            save.step in self._asked_to_delete or self._is_replaced_near(save)
        )

    def _is_replaced_near(self, save: Save) -> bool:
        """Returns True for a save that one in staging replaces."""
        return any(
            other.step == save.step
            and other is not save
            and other.directory == self.setting.staging
            for other in self.saves.values()
        )

    def find_reading(self, path: Path, lease: str) -> Reading | None:
        step = int(path.name)
        token = self.token(step)
        if token is None or lease not in self.objects(step):
            return None
        return Reading(path, token, lease)

    def check_end(self) -> None:
        """Checks the bucket after all processes were restarted."""
        is_quiet = not self.disturbing and self.disturbed < 0
        for save in self.saves.values():
            if save.is_acknowledged and save.directory == self.setting.run:
                self.check_there(save)
            elif save.is_acknowledged and is_quiet:
                self._check_uploaded(save)
        for step in self._steps():
            objects = self.objects(step)
            is_listed = self.token(step) is not None
            left = [name for name in objects if not buckets.is_status(name)]
            is_late = left == [_MARKER]  # does not count, and the next save removes it
            if left and not is_listed and not is_late and self.is_tidy:
                raise kernel.Violation(f"{step}: {left} are left for ever")
            is_pinned = self.pinned.get(self.setting.run / str(step))
            if is_listed and is_pinned and "PINNED" not in objects:
                raise kernel.Violation(f"{step} has lost its pin")
        if left := [key for key in self.bucket.objects if key.endswith(buckets.LOCK)]:
            raise kernel.Violation(f"{left} are left for ever")

    def _check_uploaded(self, save: Save) -> None:
        """Checks that an acknowledged save in staging is in the bucket, or was."""
        step = save.step
        if (
            not self._may_be_gone(save)
            and step not in self._listed  # another job may have saved it there
            and (not self.setting.latest or step > max(self._listed, default=0))
        ):
            raise kernel.Violation(f"{save} is never uploaded")


def _read_token(objects: dict[str, bytes], name: str) -> int:
    """Returns the save whose array a step has; 0 if it has none."""
    try:
        return databases.read_token(lambda file: objects[f"state/{file}"], name)
    except (KeyError, ValueError):
        return 0


def history(seed: int, *, is_traced: bool = False) -> list[kernel.Line]:
    """Runs one history; returns its timeline if traced.

    Raises:
        Violation: The history breaks a guarantee; its attribute `timeline` shows how.
    """
    with (
        programs.quiet(),
        filesystem.directory("runs") as root,
        kernel.World(seed, is_traced=is_traced) as world,
    ):
        bucket = store.open_store(world, buckets.URL, buckets.weather(world))
        disk = filesystem.FileSystem(world, root, filesystem.Weather())
        random = world.random
        near = root / "near" if random.random() < 0.3 else None
        setting = Setting(
            buckets.resolve(), near, random.choice((0, 1, 2)), random.random() < 0.3
        )
        ledger = Ledger(world, bucket, setting, disk)
        for index in range(random.randint(2, 3)):
            program: Trainer | Reader = Reader(ledger)
            if index == 0 or random.random() < 0.6:
                own = near if index == 0 else None
                program = Trainer(ledger, random.randint(1, 4), own)
            process = world.start(
                f"p{index}",
                program,
                machine="m1" if index == 0 else random.choice(("m1", "m2")),
                after=random.choice((0.0, 1.0, 30.0)) * random.random(),
            )
            _disturb(world, process)
        bucket.draw_last_write(
            lambda process, secs: world.start(
                f"{process.name}'",
                Trainer(ledger, 2, near if process.name == "p0" else None),
                machine=process.machine,
                after=secs,
            )
        )
        _note_faults(world, ledger)
        world.record(f"{bucket.weather}", f"keep={setting.keep}")
        try:
            world.run()
            bucket.weather = store.Weather()
            world.run_last(lambda: reopen(ledger))
            ledger.check_end()
        finally:
            disk.close()
        return world.timeline


def _disturb(world: kernel.World, process: kernel.Process) -> None:
    """Draws what happens to a process: a crash, pauses, a wrong clock."""
    random = world.random
    process.clock_secs = random.uniform(-100, 100)
    if random.random() < 0.3:
        process.crash_after = random.randrange(600)
    for _ in range(random.choice((0, 0, 1, 2))):
        process.pauses[random.randrange(600)] = random.choice((10, 50, 100, 400))


def _note_faults(world: kernel.World, ledger: Ledger) -> None:
    """Tells the ledger which faults the history may have."""
    processes = world.processes.values()
    has_pauses = any(process.pauses for process in processes)
    ledger.is_calm = ledger.bucket.weather == store.Weather() and not has_pauses
    paused = [p for p in processes if max(p.pauses.values(), default=0) > 45]
    dies = ledger.bucket.dies_writing
    has_crash = any(p.crash_after is not None or p.pid == dies for p in paused)
    ledger.is_tidy = len(paused) < 2 and not has_crash
