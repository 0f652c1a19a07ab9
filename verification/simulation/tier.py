"""Histories of the local tier: jobs whose processes have a disk each, and copies.

A history is a run: jobs of any number of processes, one after the other. Machines crash
and come back with their disks, without them, or with those of others; messages and
connections between peers fail. The ledger outside of all processes knows what was
acknowledged, and what each disk that is lost takes with it.
"""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

import flaxckpt
from flaxckpt import errors, policies
from flaxckpt._arrays import write
from flaxckpt._distributed import operation
from flaxckpt._run.tiers import parts, uploads
from verification.simulation import (
    databases,
    disks,
    filesystem,
    jobs,
    kernel,
    network,
    programs,
)

CONTEXTS = (filesystem.installed,)

PATCHES: dict[tuple[Any, str], Any] = {
    **jobs.PATCHES,
    **network.PATCHES,
    (uploads, "_LISTENING_SECS"): 2.0,
    (write, "_OWN_FILE_BYTES"): 64,
}
"""For `stand_ins.installed`."""

_PARTS = tuple(f"p{number}" for number in range(4))
"""The arrays that change; each is written by one process of a job."""

_FROZEN = {f"frozen_p{number}": np.full(16, -number) for number in range(2)}
"""The arrays that stay, whose files are linked from one step to the next."""

_MOST_PROCESSES = 5


# ---- what is known outside of all processes ----------------------------------------


class Save:
    """A save, whose state holds its number.

    Attributes:
        token: Its number.
        step: Its step.
        disks: Disk -> its failure domain, of the processes that save.
        survives: The number of failure domains that may be lost; None before it is
            acknowledged, and once nothing is promised any more.
        begun: When it began: its place among the ends and beginnings of all.
        order: When it ended, in the same way; `begun` before its end.
        has_ended: Whether it was acknowledged.
        is_damaged: Whether a file of it was changed.
        is_restored: Whether its copies count files that a restore has not synced.
        is_deleted: Whether its step was deleted, perhaps before the save had ended.
        inside: The processes that are saving, or have died in it.
        beside: The saves that were under way when it began.
    """

    def __init__(self, token: int, step: int, disks: dict[str, str]) -> None:
        self.token = token
        self.step = step
        self.disks = disks
        self.survives: int | None = None
        self.begun = self.order = 0
        self.has_ended = self.is_damaged = self.is_restored = self.is_deleted = False
        self.inside: set[kernel.Process] = set()
        self.beside: set[Save] = set()

    def __str__(self) -> str:
        return f"save {self.token} of step {self.step}"

    def is_before(self, other: "Save") -> bool:
        """Whether it ended before the other began, and not at the same time."""
        return self.order < other.begun and self not in other.beside

    def is_under_way(self) -> bool:
        return any(process.is_alive for process in self.inside)


class Ledger:
    """What was asked for and acknowledged.

    Args:
        world: The world.
        files: The disks.
        run: The run directory.
        near: The number of newest steps that retention keeps on the disks.

    Attributes:
        saves: Number of a save -> the save.
        far: Step in the run directory -> its save.
        on_commit: Called when a process has given its part of a save its name.
    """

    def __init__(
        self, world: kernel.World, files: disks.Disks, run: Path, near: int
    ) -> None:
        self.world = world
        self.near = near
        self.files = files
        self.run = run
        self.saves: dict[int, Save] = {}
        self.far: dict[int, int] = {}
        self.on_commit: Callable[[], object] = lambda: None
        files.on_change = self._see

    def begin_save(self, step: int, disks: dict[str, str]) -> Save:
        """Returns a new save."""
        save = Save(len(self.saves) + 1, step, disks)
        for other in self.saves.values():
            if other.step == step:
                other.survives = None  # a step is not replaced in one instant
        save.beside = {other for other in self.saves.values() if other.is_under_way()}
        self.saves[save.token] = save
        save.begun = save.order = self._next_place()
        return save

    def _next_place(self) -> int:
        return 1 + max(save.order for save in self.saves.values())

    def acknowledge(self, save: Save) -> None:
        """Notes that a save has succeeded."""
        if not save.has_ended:  # in the first of its processes
            self.world.record(f"acknowledged: {save}")
            save.has_ended = True
            rest = [s for s in self.saves.values() if s.step == save.step]
            is_last = save is max(rest, key=lambda other: other.begun)
            save.survives = 0 if is_last and not save.is_deleted else None
            save.order = self._next_place()
            steps = {s.step for s in self.saves.values() if s.survives is not None}
            steps.add(save.step)
            for other in self.saves.values():
                # Retention deletes older steps at once, not when this one has copies.
                is_old = sum(step > other.step for step in steps) >= self.near
                if is_old or (other.step == save.step and other is not save):
                    other.survives = None

    def delete(self, step: int) -> None:
        """Notes that a user deletes a step."""
        for save in self.saves.values():
            if save.step == step:
                save.survives, save.is_deleted = None, True

    def copy(
        self, save: Save, disks: dict[str, str], copies: int, *, is_restored: bool
    ) -> None:
        """Notes that the parts of a save on these disks have all copies."""
        # A restore does not verify the copies for others; a single process makes none.
        if save.is_damaged or save.is_deleted or len(disks) == 1:
            return
        save.disks, save.is_restored = dict(disks), is_restored
        save.survives = min(copies, len({*disks.values()}) - 1)
        self.world.record(f"copied: {save}", save.survives)

    def lose(self, disk: str) -> None:
        """Notes that a disk lost what it held."""
        for save in self.saves.values():
            if disk in save.disks:
                save.disks[f"lost {disk}"] = save.disks.pop(disk)

    def cut_power(self, disk: str) -> None:
        """Notes that a disk lost what was not synced."""
        for save in self.saves.values():
            if save.is_restored and disk in save.disks:
                save.disks[f"lost {disk}"] = save.disks.pop(disk)

    def forget(self, disk: str) -> None:
        """Notes that nothing is promised any more of what a disk had."""
        for save in self.saves.values():
            if disk in save.disks:
                save.survives = None

    def check_state(self, state: dict[str, np.ndarray], names: Iterable[str]) -> Save:
        """Returns the save that was restored.

        Raises:
            Violation: The values are those of several saves, or of none.
        """
        tokens = {int(value) for name in names for value in np.ravel(state[name])}
        if len(tokens) != 1 or not tokens <= self.saves.keys():
            raise kernel.Violation(f"a restore returns parts of the saves {tokens}")
        for name, values in _FROZEN.items():
            if name in state and not np.array_equal(state[name], values):
                raise kernel.Violation(f"a restore returns another {name}")
        return self.saves[tokens.pop()]

    def promised(self, present: set[str]) -> Save | None:
        """Returns the newest save that must be whole on these disks."""
        found = [
            save
            for save in self.saves.values()
            if save.survives is not None
            and len({save.disks[disk] for disk in save.disks.keys() - present})
            <= save.survives
        ]
        return max(found, key=lambda save: (save.step, save.order), default=None)

    # ---- the run directory --------------------------------------------------------

    def _see(self, name: str, paths: tuple[str, ...]) -> None:
        if name not in ("rename", "replace", "exchange"):
            return
        old, new = Path(paths[0]), Path(paths[-1])
        if new.parent.name == "local" and new.name.isdecimal():
            self.on_commit()
        if new.parent == self.run and new.name.isdecimal():
            self._see_new(new)
        elif old.parent == self.run and old.name.isdecimal():
            self.far.pop(int(old.name), None)

    def _see_new(self, path: Path) -> None:
        step = int(path.name)
        try:
            tokens = {_read_token(path, name) for name in _PARTS}
        except (OSError, ValueError) as error:
            raise kernel.Violation(f"{path.name} is uploaded, but {error}") from None
        if len(tokens) != 1:
            raise kernel.Violation(f"{path.name} is uploaded with parts of {tokens}")
        (token,) = tokens
        before = self.far.get(step)
        if before and self.saves[token].is_before(self.saves[before]):
            raise kernel.Violation(
                f"save {before} of step {step} is replaced by the older {token}"
            )
        self.far[step] = token

    def check_far(self) -> None:
        """Checks that the run directory has what it must have."""
        with self.files.observing():
            there = {int(p.name) for p in self.run.iterdir() if p.name.isdecimal()}
        if there != self.far.keys():
            raise kernel.Violation(f"the run has {there} instead of {self.far}")


def _read_token(path: Path, name: str) -> int:
    return databases.read_token(lambda f: (path / "state" / f).read_bytes(), name)


# ---- the script of a job ----------------------------------------------------------


class Setting(NamedTuple):
    """What all jobs of a history agree on.

    Attributes:
        run: The run directory.
        latest: Retention keeps this number of newest steps there; 0 for all.
        near: And this number on the local disks.
        copies: The number of copies at peers.
        domain_size: The number of machines in a failure domain.
    """

    run: Path
    latest: int
    near: int
    copies: int
    domain_size: int

    def domain(self, machine: str) -> str:
        """Returns the failure domain of a machine."""
        return f"rack{int(machine[1:]) // self.domain_size}"


class Result(NamedTuple):
    """What became of a turn in one process.

    Attributes:
        error: The error, or None.
        secs: The time that it took.
        save: The restored save.
        from_directory: Bytes that a restore has copied from the run directory.
    """

    error: errors.CheckpointError | None
    secs: float
    save: Save | None = None
    from_directory: int = 0


class Script:
    """The program of all processes of a job.

    Args:
        ledger: The ledger.
        setting: What all jobs agree on.
        job: The job.
        machines: Process -> its machine.
        turns: What they do.
        timeout_secs: Time for which processes wait for each other.
    """

    def __init__(
        self,
        ledger: Ledger,
        setting: Setting,
        job: jobs.Job,
        machines: list[str],
        turns: list[str],
        timeout_secs: float,
    ) -> None:
        self.results: list[dict[kernel.Process, Result]] = [{} for _ in turns]
        self.turns = turns
        self.timeout_secs = timeout_secs
        self.job = job
        self.machines = machines
        self._ledger = ledger
        self._setting = setting
        self.from_directory: set[Save] = set()
        self._saves: dict[int, Save] = {}

    def disks(self) -> dict[str, str]:
        """Returns disk -> its failure domain, of all processes."""
        return {name: self._setting.domain(name) for name in self.machines}

    def disk(self, index: int) -> Path:
        """Returns the disk of a process."""
        return self._ledger.files.root / self.machines[index]

    def __call__(self) -> None:
        world, setting = self._ledger.world, self._setting
        process = world.task.process
        process.__dict__[jobs.NAME] = self.job
        _Program(self, self._ledger, setting)()
        self.job.end(world)

    def save_of(self, number: int, step: int) -> Save:
        """Returns the save of a turn, the same in all processes."""
        if number not in self._saves:
            self._saves[number] = self._ledger.begin_save(step, self.disks())
        return self._saves[number]


class _Program:
    """What a process does."""

    def __init__(self, script: Script, ledger: Ledger, setting: Setting) -> None:
        self._script = script
        self._ledger = ledger
        self._setting = setting
        self._world = ledger.world
        self._index = script.job.index[self._world.task.process.pid]
        self._step = 0
        self._last: Save | None = None
        self._restored: Save | None = None
        self._from_directory = 0

    def __call__(self) -> None:
        script, world = self._script, self._world
        process = world.task.process
        try:
            self._open()
            for number, kind in enumerate(script.turns):
                begin, self._from_directory = world.now, 0
                error, save = None, None
                world.record(kind)
                try:
                    save = getattr(self, f"_{kind}")(number)
                except errors.CheckpointError as failure:
                    _check_error(failure)
                    world.record(f"{kind} fails", f"{failure!r}"[:400])
                    error = failure
                script.results[number][process] = Result(
                    error, world.now - begin, save, self._from_directory
                )
                is_new = isinstance(error, errors.CheckpointNotFoundError)
                if error is not None and kind == "restore" and not is_new:
                    return
                world.sleep(5 * world.random.random())
            world.record("close")
            self._checkpointer.close()
        except errors.CheckpointError as failure:
            _check_error(failure)
            world.record("fails", f"{failure!r}"[:400])

    def _note(self, event: flaxckpt.Event) -> None:
        if event.kind == "restored":
            is_far = Path(str(event.path)).parent == self._setting.run
            self._from_directory = event.details["from_directory"] or is_far

    def _open(self) -> None:
        script, setting = self._script, self._setting
        self._checkpointer = flaxckpt.Checkpointer(
            setting.run,
            keep=[policies.LatestN(setting.latest)] if setting.latest else [],
            staging=lambda index: script.disk(index) / "local",
            keep_staging=[policies.LatestN(setting.near)],
            staging_copies=setting.copies,
            failure_domain=lambda index: setting.domain(script.machines[index]),
            peer_timeout_secs=script.timeout_secs,
            sinks=[self._note],
        )

    def _restore(self, number: int) -> Save:
        save = self._check_restored(self._checkpointer.restore(), _PARTS)
        self._last = self._restored = save
        if self._from_directory:  # what no process had is not copied
            self._script.from_directory.add(save)
        return save

    def _restore_some(self, number: int) -> Save:
        """Restores some arrays, so that others of a part are not copied."""
        names = [*_PARTS, *_FROZEN]
        names = Random(f"{self._world.seed} {number} {self._index}").sample(names, 3)
        names = [_PARTS[0], *(name for name in names if name != _PARTS[0])]
        like = {name: np.zeros(16, np.int64) for name in names}
        state = self._checkpointer.restore(like, unused="ignore")
        return self._check_restored(state, set(_PARTS).intersection(names))

    def _check_restored(self, state: dict[str, Any], names: Iterable[str]) -> Save:
        save = self._ledger.check_state(state, names)
        if self._checkpointer.restored_step != save.step:
            raise kernel.Violation(
                f"{save} is restored as step {self._checkpointer.restored_step}"
            )
        self._world.record(f"restores {save}", f"{self._from_directory} from afar")
        self._step = save.step
        return save

    def _save(self, number: int, *, overwrite: bool = False) -> Save:
        step = self._step + (not overwrite or not self._step)
        save = self._script.save_of(number, step)
        self._step = save.step
        state = {name: np.full(16, save.token) for name in _PARTS} | _FROZEN
        process = self._world.task.process
        save.inside.add(process)
        try:
            handle = self._checkpointer.save(self._step, state, overwrite=overwrite)
            handle.wait()
        finally:
            save.inside.discard(process)
        self._ledger.acknowledge(save)
        self._last = save
        return save

    def _overwrite(self, number: int) -> Save:
        return self._save(number, overwrite=True)

    def _copies(self, number: int) -> None:
        self._checkpointer.wait_for_copies()
        save, script = self._last, self._script
        if save is None or save.survives is None or save in script.from_directory:
            return
        self._ledger.copy(
            save,
            script.disks(),
            self._setting.copies,
            is_restored=save is self._restored,
        )

    def _uploads(self, number: int) -> None:
        self._checkpointer.wait_for_uploads()

    def _pin(self, number: int) -> None:
        if self._step:
            self._checkpointer.pin(self._step)

    def _unpin(self, number: int) -> None:
        if self._step:
            self._checkpointer.unpin(self._step)

    def _measure(self, number: int) -> None:
        if self._step:
            self._checkpointer.add_metrics(self._step, {"accuracy": 0.5})

    def _prune(self, number: int) -> None:
        self._checkpointer.prune()

    def _delete(self, number: int) -> None:
        if self._step:
            self._ledger.delete(self._step)
            self._checkpointer.delete(self._step)
            self._step -= 1


def _check_error(error: errors.CheckpointError) -> None:
    """Checks that an error is not that of a defect."""
    defects = "TypeError|KeyError|AssertionError|AttributeError|IndexError|out of range"
    for name in defects.split("|"):
        if name in f"{error!r} {error.__cause__!r}":
            raise kernel.Violation(f"an error hides a defect: {error!r}") from error


# ---- invariants -------------------------------------------------------------------


def _check_agreement(script: Script) -> None:
    """Checks that all processes restore the same save."""
    for kind, results in zip(script.turns, script.results, strict=True):
        found = {str(r.save) for r in results.values() if r.save is not None}
        if len(found) > 1:
            raise kernel.Violation(f"{kind} gives {sorted(found)}")


def _check_times(script: Script) -> None:
    """Checks that processes wait no longer than documented."""
    limit = 6 * (operation._MARGIN * script.timeout_secs + operation._GRACE_SECS)
    for kind, results in zip(script.turns, script.results, strict=True):
        for process, result in results.items():
            if result.secs > limit + 3000:
                raise kernel.Violation(f"{kind} takes {result.secs:.0f} s in {process}")


def _check_calm(script: Script, promised: Save | None, far: dict[int, int]) -> None:
    """Checks the first turn, a restore, of a job without faults."""
    wanted = max(far, default=0)
    for process, result in script.results[0].items():
        save = result.save
        if save is None:
            if promised is not None or far:
                raise kernel.Violation(
                    f"{process} restores nothing, neither {promised} nor"
                    f" {far}: {result.error!r}"
                )
            continue
        if save.step < wanted:
            raise kernel.Violation(f"{process} restores {save} instead of {wanted}")
        if promised is None or save.step > promised.step:
            continue
        if save.step < promised.step or save.is_before(promised):
            raise kernel.Violation(f"{process} restores {save} instead of {promised}")
        if result.from_directory:
            raise kernel.Violation(f"{process} reads {save} from the run directory")


def _check_last(script: Script) -> None:
    """Checks a job without faults that restores, saves, copies, and restores."""
    _, saved, copied, *_, restored = script.results
    for process, result in [*saved.items(), *copied.items()]:
        if result.error is not None:
            raise kernel.Violation(f"{process} cannot save: {result.error!r}")
    for process, result in restored.items():
        if result.save is not saved[process].save or result.from_directory:
            raise kernel.Violation(f"{process} does not restore what it saved")


def _check_waiting(disks: list[Path]) -> None:
    """Checks that nothing waits for an upload that process 0 has made."""
    first, *others = [
        {path.parent for path in disk.glob("local/*/NOT_UPLOADED")} for disk in disks
    ]
    for path in sorted({path for some in others for path in some}):
        same = disks[0] / "local" / path.name
        if (same / "DAMAGED").exists():
            continue  # it is left out
        is_same = parts.identify(path) == parts.identify(same)
        if is_same and same not in first:
            raise kernel.Violation(f"{path} still waits for its upload")


def _check_leftovers(directory: Path) -> None:
    """Checks that nothing of a crash is left for ever."""
    names = {path.name for path in directory.iterdir()}
    left = {name for name in names if not name.isdecimal()}
    left -= {"STAGING_OF", "events.jsonl"}
    for path in directory.iterdir():
        if path.name.isdecimal():
            temporary = [p for p in path.rglob("*") if p.name.endswith((".tmp", "~"))]
            left |= {f"{path.name}/{p.name}" for p in temporary}
    if left:
        raise kernel.Violation(f"{sorted(left)} are left for ever in {directory}")


# ---- histories --------------------------------------------------------------------

_KINDS = {
    "save": 5,
    "overwrite": 2,
    "restore": 1,
    "copies": 6,
    "uploads": 1,
    "restore_some": 1,
    "pin": 1,
    "unpin": 1,
    "measure": 1,
    "prune": 1,
    "delete": 1,
}
"""What jobs do -> how often, relative to the others."""


_FAULTS = (
    "crash",
    "outage",
    "outage",
    "pause",
    "cut",
    "apart",
    "network",
    "disk",
    "run",
)
"""What happens to jobs."""


class Story:
    """A run, job by job.

    Args:
        world: The world.
        files: The disks.
        **fixed: Fields of the setting that are not drawn.

    Attributes:
        world: The world.
        files: The disks.
        ledger: What was asked for and acknowledged.
    """

    def __init__(self, world: kernel.World, files: disks.Disks, **fixed: int) -> None:
        random = world.random
        self.world = world
        self.files = files
        self._random = random
        self._network = network.Network(world)
        self._setting = Setting(
            files.root / "run",
            random.choice((0, 0, 1, 2)),
            random.choice((1, 1, 2)),
            random.choice((0, 1, 1, 2)),
            random.choice((1, 1, 2)),
        )._replace(**fixed)
        self._setting.run.mkdir()
        self._machines = [f"m{number}" for number in range(_MOST_PROCESSES + 1)]
        for name in self._machines:
            (files.root / name).mkdir()
        self.ledger = Ledger(world, files, self._setting.run, self._setting.near)
        self._starts = 0
        self._crashed: set[str] = set()
        world.record(f"{self._setting}")

    def keep_near(self, near: int) -> None:
        """Lets retention keep another number of steps on the disks from now on."""
        self._setting = self._setting._replace(near=near)
        self.ledger.near = near

    def run(self) -> None:
        """Runs all jobs."""
        random = self._random
        count = random.randint(2, _MOST_PROCESSES)
        for _ in range(random.randint(1, 3)):
            self.run_job(count, self._draw_turns(), is_calm=random.random() < 0.3)
            self._change_disks()
            if random.random() < 0.5:
                count = random.randint(1, _MOST_PROCESSES)
        self.end(count)

    def end(self, count: int) -> None:
        """Runs a last job, without faults."""
        turns = ["restore", "save", "copies", "pin", "uploads", "restore"]
        script = self.run_job(count, turns, is_calm=True, pause=700.0)
        _check_last(script)
        for machine in script.machines:
            _check_leftovers(self.files.root / machine / "local")
        _check_leftovers(self._setting.run)
        _check_waiting([script.disk(n) for n in range(count)])

    def _draw_turns(self) -> list[str]:
        kinds, weights = list(_KINDS), list(_KINDS.values())
        size = self._random.randint(1, 6)
        return ["restore", *self._random.choices(kinds, weights, k=size)]

    def run_job(
        self,
        count: int,
        turns: list[str],
        *,
        is_calm: bool,
        pause: float | None = None,
        clock_secs: float = 0.0,
    ) -> Script:
        """Runs a job, and checks it.

        Args:
            count: The number of processes.
            turns: What they do.
            is_calm: Whether there are no faults, so that the first turn, a restore,
                must do what is promised.
            pause: The seconds before it starts; None to draw them.
            clock_secs: The error of the clocks, unless the job is disturbed.
        """
        world, random = self.world, self._random
        pause = random.choice((0.0, 0.0, 700.0)) if pause is None else pause
        machines = self._machines[:count]
        script, processes = self._start_job(machines, turns, pause, is_calm=is_calm)
        for process in processes:
            process.clock_secs = clock_secs
        scripts = [script]
        present = {str(machine) for machine in machines}
        promised, far = self.ledger.promised(present), dict(self.ledger.far)
        world.record(f"a job of {count}, {'calm' if is_calm else 'disturbed'}")
        world.record(f"promised: {promised}, far: {far}")
        if not is_calm:
            self._disturb(processes, script.job.service)
            if random.random() < 0.2:  # as this job was taken for dead
                after, count = 60 * random.random(), random.randint(1, _MOST_PROCESSES)
                others = self._machines[:count]
                other, more = self._start_job(
                    others, self._draw_turns(), pause + after, is_calm=False
                )
                world.record(f"another job of {count}", f"after {after:.1f}")
                scripts.append(other)
                processes += more
        world.run(limit_secs=50_000.0)
        self._network.weather = network.Weather()
        self._network.apart.clear()
        self.ledger.on_commit = lambda: None
        self.files.failing.clear()
        self.files.weather = filesystem.Weather()
        for each in scripts:
            _check_agreement(each)
            _check_times(each)
        if is_calm:
            _check_calm(script, promised, far)
        self.ledger.check_far()
        self._crashed |= {p.machine for p in processes if p.crash_after is not None}
        return script

    def run_together(self, *jobs: tuple[int, list[str]]) -> None:
        """Runs jobs at one time, in each of which the others were taken for dead.

        Args:
            *jobs: The number of processes, and what they do.
        """
        for count, turns in jobs:
            self._start_job(self._machines[:count], turns, 0.0, is_calm=False)
        self.world.run(limit_secs=50_000.0)
        self.ledger.check_far()

    def _start_job(
        self, machines: list[str], turns: list[str], pause: float, *, is_calm: bool
    ) -> tuple[Script, list[kernel.Process]]:
        """Starts a job after `pause` seconds."""
        world, random = self.world, self._random
        slow = 0.0 if is_calm else random.choice((0.0, 0.0, 0.02, 0.1))
        weather = jobs.Weather(
            slow,
            random.choice((1.0, 5.0)),
            repeated=0.0 if is_calm else random.choice((0.0, 0.0, 0.1)),
        )
        service = jobs.Service(world, weather)
        job = jobs.Job(len(machines), service, self._starts)
        timeout_secs = random.choice((20.0, 100.0))
        script = Script(self.ledger, self._setting, job, machines, turns, timeout_secs)
        processes = []
        for index, machine in enumerate(machines):
            process = world.start(
                f"{'abcdefghijklmnop'[self._starts]}{index}",
                script,
                machine=machine,
                after=pause + 5 * random.random(),
            )
            job.index[process.pid] = index
            processes.append(process)
        service.host = processes[0]
        self._starts += 1
        return script, processes

    def _disturb(self, processes: list[kernel.Process], service: jobs.Service) -> None:
        """Draws what happens to a job."""
        random, world = self._random, self.world
        for process in processes:
            process.clock_secs = random.uniform(-10_000, 10_000)
        for kind in random.sample(_FAULTS, random.randint(0, 3)):
            process = random.choice(processes)
            begin, secs = 40 * random.random(), 100 * random.random()
            world.record(f"fault: {kind} {process}", f"{begin:.1f} {secs:.1f}")
            if kind == "crash":
                process.crash_after = random.randrange(4000)
            elif kind == "outage":
                size = random.randint(1, len(processes))
                self._draw_outage(random.sample(processes, size))
            elif kind == "pause":
                process.pauses[random.randrange(4000)] = random.choice((40, 80, 300))
            elif kind == "cut":
                self._at(begin, secs, service.cut_off, process.pid)
            elif kind == "apart":
                other = random.choice(processes)
                pair = frozenset((process.machine, other.machine))
                self._at(begin, secs, self._network.apart, pair)
            elif kind == "network":
                self._network.weather = network.Weather(
                    random.choice((0.05, 0.3, 1.0)), random.choice((0.0, 0.1))
                )
            else:
                path = self.files.root / process.machine
                path = self._setting.run if kind == "run" else path
                chance = random.choice((0.02, 1.0))
                failing = self.files.failing
                world.at(begin, functools.partial(failing.__setitem__, path, chance))
                world.at(begin + secs, functools.partial(failing.pop, path, None))

    def _draw_outage(self, processes: list[kernel.Process]) -> None:
        """Lets processes crash while a step, or its replacement, is committed."""
        world, left = self.world, [self._random.randint(1, 3 * len(processes))]

        def see() -> None:
            left[0] -= 1
            if left[0] == 0:
                for process in processes:
                    self._crashed.add(process.machine)
                    world.at(0.0, functools.partial(world.crash, process))

        self.ledger.on_commit = see

    def _at(self, begin: float, secs: float, group: set[Any], what: Any) -> None:
        self.world.at(begin, functools.partial(group.add, what))
        if self._random.random() < 0.7:
            lift = functools.partial(group.discard, what)
            self.world.at(begin + secs, lift)

    # ---- disks ----------------------------------------------------------------------

    def _change_disks(self) -> None:
        """Draws what happens to the disks between two jobs."""
        random, world = self._random, self.world
        crashed, self._crashed = sorted(self._crashed), set()
        for machine in crashed:
            disk = self.files.root / machine
            kind = random.choice(("kept", "power", "power", "gone"))
            world.record(f"the disk of {machine}: {kind}")
            if kind == "power":
                self.files.cut_power(disk, random)
                self.ledger.cut_power(machine)
            elif kind == "gone":
                self.lose(machine)
        if random.random() < 0.5:
            lost = random.choice(self._machines)
            domain, is_whole = self._setting.domain(lost), random.random() < 0.5
            for name in sorted(self._machines):
                if name == lost or (is_whole and self._setting.domain(name) == domain):
                    self.lose(name)
        if random.random() < 0.15:
            self._damage(random.choice(self._machines))
        if random.random() < 0.1:
            self._give_to_another_run(random.choice(self._machines))
        if random.random() < 0.3:
            self.swap(*random.sample(self._machines, 2))

    def lose(self, machine: str) -> None:
        """Lets a machine lose its disk."""
        self.world.record(f"the disk of {machine} is lost")
        shutil.rmtree(self.files.root / machine)
        (self.files.root / machine).mkdir()
        self.ledger.lose(machine)

    def _give_to_another_run(self, machine: str) -> None:
        """Lets another run use a disk, and a job find that out."""
        self.world.record(f"another run uses the disk of {machine}")
        local = self.files.root / machine / "local"
        local.mkdir(exist_ok=True)
        (local / "STAGING_OF").write_bytes(b"/another/\xff\n")
        self.run_job(len(self._machines) - 1, self._draw_turns(), is_calm=False)
        self.lose(machine)

    def swap(self, one: str, other: str) -> None:
        """Lets two machines swap their places."""
        self.world.record(f"{one} and {other} swap their disks")
        self._machines = [
            {one: other, other: one}.get(name, name) for name in self._machines
        ]

    def _damage(self, machine: str) -> None:
        """Changes a file of a disk."""
        random = self._random
        root = self.files.root / machine
        files = sorted(path for path in root.rglob("*") if path.is_file())
        files = [path for path in files if path.name != "STAGING_OF"]
        if not files:
            return
        file = random.choice(files)
        kind = random.choice(("flipped", "truncated", "removed"))
        self.world.record(f"{file.relative_to(root.parent)} is {kind}")
        for save in self.ledger.saves.values():
            save.is_damaged |= machine in save.disks
        self.ledger.lose(machine)
        if "/state/d/" not in f"{file}":  # then the step counts as damaged everywhere
            self.ledger.forget(f"lost {machine}")
        content = bytearray(file.read_bytes())
        if kind == "removed" or not content:
            file.unlink()
            return
        if kind == "truncated":
            del content[random.randrange(len(content)) :]
        else:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        file.write_bytes(content)


@contextlib.contextmanager
def story(seed: int, *, is_traced: bool = False, **fixed: int) -> Iterator[Story]:
    """Yields the story of a seed; see `Story`."""
    with (
        programs.quiet(),
        filesystem.directory("tier") as root,
        kernel.World(seed, is_traced=is_traced) as world,
    ):
        files = disks.Disks(world, root, filesystem.Weather())
        try:
            yield Story(world, files, **fixed)
        finally:
            files.close()


def history(seed: int, *, is_traced: bool = False) -> list[kernel.Line]:
    """Runs one history; returns its timeline if traced.

    Raises:
        Violation: The history breaks a guarantee; its attribute `timeline` shows how.
    """
    with story(seed, is_traced=is_traced) as played:
        played.run()
        return played.world.timeline
