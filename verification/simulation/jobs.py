"""Histories of jobs of several processes, which save and restore together.

All processes of a job run the same script with a `Checkpointer` on one run directory.
Each has an array on devices of its own. Their messages go through a simulated
coordination service, which ends with process 0, or through files.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

import flaxckpt
from flaxckpt import _arrays, _util, errors
from flaxckpt._checkpoint import save_distributed
from flaxckpt._distributed import heartbeat, operation
from verification.simulation import files, filesystem, kernel, programs

CONTEXTS = (filesystem.installed,)

NAME = "job"
"""The name of a `Job` in `World.shared`."""

_GRACE_SECS = 30.0
_SHUTDOWN_SECS = 300.0
"""Time for which jax's process 0 waits for the others at its exit."""


class Weather(NamedTuple):
    """Chances of faults of the coordination service, per request.

    Attributes:
        slow: The chance that a request takes up to `slowest_secs`.
        slowest_secs: The longest time of a request.
        uses_files: Whether there is no service, so that messages are files.
        repeated: The chance that a message comes a second time, up to `slowest_secs`
            later.
    """

    slow: float = 0.0
    slowest_secs: float = 5.0
    uses_files: bool = False
    repeated: float = 0.0


class Service:
    """The coordination service of a job: a key-value store in process 0.

    Args:
        world: The world.
        weather: The chances of faults.

    Attributes:
        host: Process 0; the service ends with it.
        cut_off: PIDs of processes that have lost the service.
    """

    def __init__(self, world: kernel.World, weather: Weather) -> None:
        self.host: kernel.Process | None = None
        self.cut_off: set[int] = set()
        self._world = world
        self._weather = weather
        self._texts: dict[str, str] = {}
        self._waiting: list[kernel.Ticket] = []

    def set(self, key: str, text: str) -> None:
        """Sets or replaces a text."""
        self._travel(f"set {key}")
        self._world.record(f"set {_brief(key)}", text[:60])
        self._texts[key] = text
        world, weather = self._world, self._weather
        if weather.repeated and world.random.random() < weather.repeated:
            again = functools.partial(self._texts.__setitem__, key, text)
            world.at(weather.slowest_secs * world.random.random(), again)
        self._world.wake_all(self._waiting)
        self._travel(f"set {key}")

    def get(self, key: str, timeout_secs: float) -> str:
        """Waits for a text, or raises TimeoutError."""
        until = self._world.now + timeout_secs
        self._travel(f"get {key}")
        while key not in self._texts:
            left = until - self._world.now
            if left <= 0:
                raise TimeoutError("DEADLINE_EXCEEDED")
            self._waiting.append(self._world.ticket())
            self._world.wait(f"get {key}", left)
            self._check()
        text = self._texts[key]
        self._travel(f"get {key}")
        return text

    def list(self, prefix: str) -> dict[str, str]:
        """Returns the texts below `prefix`: the rest of each key -> text."""
        self._travel(f"list {prefix}")
        prefix += "/"
        return {
            key.removeprefix(prefix): text
            for key, text in self._texts.items()
            if key.startswith(prefix)
        }

    def delete(self, prefix: str) -> None:
        """Deletes all texts below `prefix`."""
        self._travel(f"delete {prefix}")
        for key in [key for key in self._texts if key.startswith(f"{prefix}/")]:
            del self._texts[key]

    def _travel(self, what: str) -> None:
        world, weather = self._world, self._weather
        world.point(what)
        if weather.slow and world.random.random() < weather.slow:
            world.sleep(weather.slowest_secs * world.random.random())
        self._check()

    def _check(self) -> None:
        is_ended = self.host is None or not self.host.is_alive
        if is_ended or self._world.task.process.pid in self.cut_off:
            raise ConnectionError("UNAVAILABLE: the coordination service has ended")


def _brief(key: str) -> str:
    return key.removeprefix("flaxckpt/")


class Job:
    """The processes of a job.

    Attributes:
        index: PID -> number of the process.
        count: The number of processes.
        service: The service for their messages, or None.
        start: The number of the start of the job.
        writing: Process -> the directory into which it writes its part.
    """

    def __init__(self, count: int, service: Service | None, start: int) -> None:
        self.index: dict[int, int] = {}
        self.count = count
        self.service = service
        self.start = start
        self.writing: dict[kernel.Process, Path] = {}
        self._ended: set[int] = set()

    def end(self, world: kernel.World) -> None:
        """Ends a process of the job; process 0 waits for the others, as in jax."""
        assert world.task is not None
        pid = world.task.process.pid
        self._ended.add(pid)
        until = world.now + _SHUTDOWN_SECS
        while (
            self.index[pid] == 0
            and world.now < until
            and not self._are_others_gone(world)
        ):
            world.sleep(1.0)

    def _are_others_gone(self, world: kernel.World) -> bool:
        return all(
            pid in self._ended or not world.processes[pid].is_alive
            for pid in self.index
        )


def _job() -> tuple[Job | None, int]:
    """Returns the job of the running process, and its number there."""
    world = kernel.current()
    if world is None or world.task is None:
        return None, 0
    job = world.task.process.__dict__.get(NAME)
    return (None, 0) if job is None else (job, job.index[world.task.process.pid])


def _owner(name: str, count: int) -> int:
    return int(name.rpartition("p")[2]) % count


def _is_here(leaf: save_distributed.Named) -> bool:
    job, index = _job()
    return job is None or _owner(leaf[2].info.path, job.count) == index


_to_host = _arrays.to_host.to_host


def _own_to_host(leaves: Any, *args: Any) -> list[_arrays.to_host.HostArray]:
    """Stands in for `to_host`, where each array is on devices of one process."""
    arrays = _to_host(leaves, *args)
    return [
        array if _is_here(leaf) else array._replace(shards=())
        for array, leaf in zip(arrays, leaves, strict=True)
    ]


_write_part = save_distributed._write_part


def _noted_write_part(snapshot: Any, temporary: Path, *args: Any) -> Any:
    """Notes, for the invariants, that a process writes its part."""
    writing, process = _job()[0].writing, kernel.current().task.process
    writing[process] = temporary
    try:
        return _write_part(snapshot, temporary, *args)
    finally:
        writing.pop(process, None)


PATCHES: dict[tuple[Any, str], Any] = {
    (_util.job, "_has_joined"): lambda: _job()[0] is not None,
    (_util.processes, "process_index"): lambda: _job()[1],
    (_util.processes, "process_count"): lambda: getattr(_job()[0], "count", 1),
    (_util.processes, "service"): lambda: getattr(_job()[0], "service", None),
    (_util.processes, "broadcast_bytes"): lambda mine: bytes([_job()[0].start]) * 8,
    (_arrays.to_host, "to_host"): _own_to_host,
    (save_distributed, "_is_on_devices"): lambda leaf: True,
    (save_distributed, "_is_here"): _is_here,
    (save_distributed, "_write_part"): _noted_write_part,
}
"""For `stand_ins.installed`."""


# ---- the script of a job ----------------------------------------------------------


class Turn(NamedTuple):
    """What all processes of a job do at the same point of their program.

    Attributes:
        kind: `save`, `overwrite` or `restore`.
        step: The step.
    """

    kind: str
    step: int


class Result(NamedTuple):
    """What became of a turn in one process.

    Attributes:
        error: The error, or None.
        secs: The time that it took.
    """

    error: errors.CheckpointError | None
    secs: float


class Script:
    """The program of all processes of a job.

    Args:
        ledger: The ledger.
        job: The job.
        turns: The turns.
        timeout_secs: Time for which processes wait for each other.
    """

    def __init__(
        self, ledger: files.Ledger, job: Job, turns: list[Turn], timeout_secs: float
    ) -> None:
        self.results: list[dict[kernel.Process, Result]] = [{} for _ in turns]
        self.timeout_secs = timeout_secs
        self.turns = turns
        self._ledger = ledger
        self._job = job
        self._saves: dict[int, programs.Save] = {}

    def __call__(self) -> None:
        world = self._ledger.world
        process, setting = world.task.process, self._ledger.setting
        process.__dict__[NAME] = self._job
        with self._ledger.operation("run"):
            checkpointer = flaxckpt.Checkpointer(
                setting.run, keep=setting.keep, peer_timeout_secs=self.timeout_secs
            )
            for number, turn in enumerate(self.turns):
                begin = world.now
                error = None
                try:
                    self._take(number, turn, checkpointer)
                except errors.CheckpointError as failure:
                    world.record(f"{turn.kind} {turn.step} fails", f"{failure}"[:200])
                    error = failure
                self.results[number][process] = Result(error, world.now - begin)
                world.sleep(5 * world.random.random())
            checkpointer.close()
        self._job.end(self._ledger.world)

    def _take(
        self, number: int, turn: Turn, checkpointer: flaxckpt.Checkpointer
    ) -> None:
        self._ledger.world.record(f"{turn.kind} {turn.step}")
        if turn.kind == "restore":
            state = checkpointer.restore()
            self._ledger.check_state(state, "restore")
            return
        if number not in self._saves:
            run = self._ledger.setting.run
            self._saves[number] = self._ledger.begin_save(turn.step, run)
        save = self._saves[number]
        handle = checkpointer.save(
            turn.step,
            {name: np.array([save.token]) for name in self._ledger.parts},
            overwrite=turn.kind == "overwrite",
        )
        try:
            handle.wait()
        finally:
            self._ledger.end_writing()
        self._ledger.acknowledge(save)


# ---- invariants -------------------------------------------------------------------


def _check_agreement(script: Script, troubled: set[kernel.Process]) -> None:
    """Checks that processes without trouble succeed, or fail, together."""
    for turn, results in zip(script.turns, script.results, strict=True):
        good = {p: r for p, r in results.items() if p not in troubled}
        failed = {p.name: r.error for p, r in good.items() if r.error is not None}
        if failed and len(failed) < len(good):
            raise kernel.Violation(
                f"{turn} fails in {sorted(failed)} only: {[*failed.values()]}"
            )
        common = {
            str(error).partition(": ")[2]
            for error in failed.values()
            if "by all" in str(error).partition("\n")[0]
        }
        if len(common) > 1:
            raise kernel.Violation(f"{turn} fails with different errors: {common}")


def _check_times(
    script: Script, troubled: set[kernel.Process], slack_secs: float
) -> None:
    """Checks that processes without trouble wait no longer than documented."""
    timeout = script.timeout_secs
    survivors = script.results[-1]
    limit = 4 * (operation._MARGIN * timeout + _GRACE_SECS) + slack_secs
    # A dead process is missed earlier, once it was heard.
    is_missed = all(not p.is_alive and p not in survivors for p in troubled)
    missed = min(limit, heartbeat.SILENT_SECS + 2 * _GRACE_SECS + slack_secs)
    for turn, results in zip(script.turns, script.results, strict=True):
        for process, result in results.items():
            if process not in troubled and result.secs > limit:
                raise kernel.Violation(
                    f"{turn} takes {result.secs:.0f} s in {process}, more than {limit}"
                )
        if is_missed and all(process in results for process in troubled):
            limit = missed


class _Removals:
    """Checks that no process removes a directory into which another one writes.

    Args:
        ledger: The ledger.
        job: The job.
        troubled: Processes that may be late, so that others need not wait for them.
    """

    def __init__(
        self, ledger: files.Ledger, job: Job, troubled: set[kernel.Process]
    ) -> None:
        self._ledger = ledger
        self._job = job
        self._troubled = troubled
        self._see = ledger.files.on_change
        ledger.files.on_change = self

    def __call__(self, name: str, paths: tuple[str, ...]) -> None:
        self._see(name, paths)
        if name not in ("unlink", "rmdir"):
            return
        for process, directory in self._job.writing.items():
            is_late = process in self._troubled or not process.is_alive
            is_inside = f"{paths[-1]}/".startswith(f"{directory}/")
            if is_inside and not is_late:
                raise kernel.Violation(
                    f"{directory} is removed, and {process} still writes into it"
                )


# ---- histories --------------------------------------------------------------------


def _draw_turns(world: kernel.World) -> list[Turn]:
    turns, step = [], 0
    for _ in range(world.random.randint(1, 4)):
        kind = world.random.choice(("save", "save", "save", "overwrite", "restore"))
        step += kind == "save" or not step
        turns.append(Turn(kind if step > 1 or kind != "restore" else "save", step))
    return turns


def _start(
    ledger: files.Ledger, weather: Weather, count: int, start: int
) -> tuple[Script, list[kernel.Process]]:
    """Starts all processes of a job."""
    world = ledger.world
    service = None if weather.uses_files else Service(world, weather)
    job = Job(count, service, start)
    timeout_secs = world.random.choice((20.0, 100.0, 600.0))
    script = Script(ledger, job, _draw_turns(world), timeout_secs)
    processes = []
    for index in range(count):
        after = 5 * world.random.random()
        process = world.start(
            f"{'abc'[start]}{index}", script, machine=f"m{index}", after=after
        )
        job.index[process.pid] = index
        processes.append(process)
    if service is not None:
        service.host = processes[0]
    return script, processes


def _disturb(
    world: kernel.World, processes: list[kernel.Process], service: Service | None
) -> set[kernel.Process]:
    """Draws what happens to a job; returns the processes in trouble."""
    random = world.random
    troubled: set[kernel.Process] = set()
    for process in processes:
        process.clock_secs = random.uniform(-10_000, 10_000)
    for kind in random.choice(((), ("crash",), ("pause",), ("cut",), ("crash", "cut"))):
        process = random.choice(processes)
        troubled.add(process)
        if kind == "crash":
            process.crash_after = random.randrange(400)
        elif kind == "pause":
            process.pauses[random.randrange(400)] = random.choice((40, 80, 300, 1500))
        elif service is not None:
            lose = functools.partial(service.cut_off.add, process.pid)
            begin = 20 * random.random()
            world.at(begin, lose)
            if random.random() < 0.5:
                find = functools.partial(service.cut_off.discard, process.pid)
                world.at(begin + 100 * random.random(), find)
    return troubled


def _last_program(ledger: files.Ledger) -> None:
    """Opens the run again, as a single process, after the faults."""
    for _ in range(3):
        with ledger.operation("last"):
            flaxckpt.Checkpointer(ledger.setting.run, keep=ledger.setting.keep).close()
        ledger.world.sleep(90_000.0)


def history(seed: int, *, is_traced: bool = False) -> list[kernel.Line]:
    """Runs one history; returns its timeline if traced.

    Raises:
        Violation: The history breaks a guarantee; its attribute `timeline` shows how.
    """
    return play(seed, files.draw_weather, _draw_weather, _disturb, is_traced=is_traced)


def _draw_weather(world: kernel.World) -> Weather:
    random = world.random
    return Weather(
        slow=random.choice((0.0, 0.0, 0.02, 0.1)),
        slowest_secs=random.choice((1.0, 5.0)),
        uses_files=random.random() < 0.3,
    )


def play(
    seed: int,
    draw_disk: Callable[[kernel.World], filesystem.Weather],
    draw_service: Callable[[kernel.World], Weather],
    disturb: Callable[
        [kernel.World, list[kernel.Process], Service | None], set[kernel.Process]
    ],
    *,
    is_traced: bool,
) -> list[kernel.Line]:
    """Runs a history whose faults are drawn by these functions.

    Args:
        seed: The seed.
        draw_disk: Returns the chances of faults of the file system.
        draw_service: Returns the chances of faults of the coordination service.
        disturb: Draws what happens to a job; returns the processes in trouble.
        is_traced: Whether to keep the timeline.

    Raises:
        Violation: The history breaks a guarantee; its attribute `timeline` shows how.
    """
    with (
        programs.quiet(),
        filesystem.directory("jobs") as root,
        kernel.World(seed, is_traced=is_traced) as world,
    ):
        disk = filesystem.FileSystem(world, root, draw_disk(world))
        random = world.random
        count = random.choice((2, 2, 3))
        setting = programs.Setting(root / "run", None, random.choice((0, 1, 2)), False)
        parts = tuple(f"p{i}" for i in range(count))
        ledger = files.Ledger(world, disk, setting, parts)
        weather = draw_service(world)
        world.record(f"{setting}")
        world.record(f"{disk.weather} {weather}")
        script, processes = _start(ledger, weather, count, 0)
        service = script._job.service
        troubled = disturb(world, processes, service)
        is_slow = disk.weather.slow * disk.weather.slowest_secs >= 0.1 or weather.slow
        if not is_slow:  # processes wait for late ones for half a minute only
            _Removals(ledger, script._job, troubled)
        scripts = [script] if processes[0] not in troubled else []

        def start_again() -> None:
            scripts.append(_start(ledger, weather, count, 1)[0])

        luck = Random(f"start again {seed}")
        if luck.random() < 0.3:  # perhaps while the first job goes on
            world.at(100 * luck.random(), start_again)
        try:
            world.run(limit_secs=20_000.0)
            for each in scripts if not disk.weather.fails else ():
                _check_agreement(each, troubled)
                _check_times(each, troubled, 60.0)
            disk.weather = disk.weather._replace(slow=0.0, fails=0.0)
            world.run_last(lambda: _last_program(ledger), limit_secs=400_000.0)
            ledger.check_end()
        finally:
            disk.close()
        return world.timeline
