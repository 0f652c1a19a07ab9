"""A simulated world: a virtual clock, a seeded scheduler, processes and their tasks.

Each task is a greenlet, so exactly one runs at a time, and another one runs only where
a task waits: `wait`, `sleep` or `point`. What happens next is decided by the random
numbers of the seed alone. Therefore, one seed is one history, to the last event.

    with stand_ins.installed(), kernel.World(seed) as world:
        world.start("a", program)           # a process; `program` takes no arguments
        world.at(30, lambda: world.pause(process, 120))
        world.run()                         # until all processes have ended

Inside of `program`, flaxckpt's modules find the stand-ins of `stand_ins` instead of
`time`, `threading` and so on. Simulated storage is made of these parts:

* `world.point(what)`: another task may run here, or the process may crash;
* `ticket = world.ticket()`, then `world.wait(what, secs)` suspends the task until
  someone calls `world.wake(ticket)`, or for `secs`;
* `world.at(secs, action)` calls `action`, which is no task and may not wait;
* `world.record(what, answer)` adds a line to the timeline.

The state that flaxckpt keeps in its modules is swapped when another process runs, see
`process_state`.
"""

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import greenlet

from verification.simulation import process_state

EPOCH = 1_800_000_000.0
"""The time of all clocks at the start of a history, in seconds since 1970."""

LIMIT_SECS = 24 * 3600.0
LIMIT_EVENTS = 200_000


class Violation(AssertionError):  # noqa: N818  the term of the field
    """A history breaks a guarantee.

    Attributes:
        timeline: The lines of the history, if it was traced.
    """

    timeline: "list[Line]" = []  # noqa: RUF012  set by `World`


class Killed(BaseException):
    """Ends the tasks of a dead process, at the end of the history."""


class Ticket(NamedTuple):
    """A certain wait of a task; a later wait has another ticket."""

    task: "Task"
    turn: int

    def is_valid(self) -> bool:
        """Returns True unless the wait is over."""
        return self.turn == self.task.turn and not self.task.is_ended


class Task:
    """A thread of a simulated process.

    Attributes:
        process: The process.
        name: Name of the thread.
        is_daemon: Whether the process ends without waiting for the task.
        is_ended: Whether the task has returned.
        waits_for: What it waits for, for reports.
        locals: Values of `threading.local` objects.
    """

    def __init__(
        self, process: "Process", run: Callable[[], object], name: str, is_daemon: bool
    ) -> None:
        self.process = process
        self.name = name
        self.is_daemon = is_daemon
        self.is_ended = False
        self.waits_for = ""
        self.locals: dict[object, dict] = {}
        self.joining: list[Ticket] = []
        self.turn = 0
        self._run = run
        self.greenlet = greenlet.greenlet(self._body, process.world.hub)

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"

    def _body(self, woken: bool) -> None:
        world = self.process.world
        try:
            self._run()
        except Killed:
            return
        except BaseException as error:
            if self.process.is_alive:
                world.errors.append((self, error))
        world._end(self)


class Process:
    """A simulated process.

    Attributes:
        name: Its name in the timeline.
        pid: Its number, which no other process of the world has.
        machine: The name of its machine; processes see whether others of the same
            machine are alive.
        clock_secs: Its wall clock minus the world's; it may change at any time.
        is_alive: False once the process has ended, or crashed.
        paused_until: The time until which none of its tasks runs.
        points: The number of points that it has passed.
        crash_after: The number of further points after which it crashes, or None.
        pauses: Number of a point -> the seconds for which the process pauses there, or
            at the next point where it may.
        tasks: Its tasks that have not ended.
    """

    def __init__(self, world: "World", name: str, pid: int, machine: str) -> None:
        self.world = world
        self.name = name
        self.pid = pid
        self.machine = machine
        self.clock_secs = 0.0
        self.is_alive = True
        self.paused_until = 0.0
        self.points = 0
        self.crash_after: int | None = None
        self.pauses: dict[int, float] = {}
        self.tasks: list[Task] = []
        self.state = process_state.ProcessState()

    def __repr__(self) -> str:
        return self.name


class Line(NamedTuple):
    """A line of the timeline."""

    secs: float
    who: str
    what: str
    answer: str

    def __str__(self) -> str:
        return f"{self.secs:10.3f}  {self.who:<22}  {self.what:<56}  {self.answer}"


class World:
    """A world with a virtual clock; use it as a context manager.

    Args:
        seed: Decides everything that is left to chance.
        is_traced: Whether to keep the timeline.

    Attributes:
        seed: The seed.
        random: The random numbers of the seed.
        now: Seconds since the start of the history.
        task: The task that runs; None between tasks.
        processes: PID -> process, also of those that have ended.
        timeline: The lines of the history so far, if traced.
        errors: Tasks that ended with an error, with the error.
        hub: The greenlet of the scheduler.
        thread: The thread of the world.
        shared: What is outside of all processes, such as storage, by name.
    """

    def __init__(self, seed: int, *, is_traced: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.task: Task | None = None
        self.processes: dict[int, Process] = {}
        self.is_traced = is_traced
        self.timeline: list[Line] = []
        self.shared: dict[str, Any] = {}
        self.errors: list[tuple[Task, BaseException]] = []
        self.hub = greenlet.getcurrent()
        self.thread = threading.get_ident()
        self._agenda: list[tuple] = []
        self._numbers = itertools.count()
        self._loaded: Process | None = None
        self._all_tasks: list[Task] = []
        self._pending_actions = 0
        self._end_secs = self._events_left = 0.0
        self._is_closed = False

    def __enter__(self) -> "World":
        global _current
        assert _current is None, "one world at a time"
        _current = self
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        global _current
        if isinstance(error, Violation):
            error.timeline = self.timeline
        try:
            self._close()
        finally:
            process_state.restore()
            _current = None

    def _close(self) -> None:
        """Ends all tasks; whatever they do on the way has no effect."""
        self._is_closed = True
        for task in self._all_tasks:
            if task.greenlet:  # started, and not ended
                self._load(task.process)
                self.task = task
                task.process.is_alive = False
                task.greenlet.throw(Killed)
        self.task = None

    # ---- the timeline -------------------------------------------------------------

    def record(self, what: str, answer: object = "") -> None:
        """Adds a line to the timeline, if there is one."""
        if self.is_traced and not self._is_closed:
            who = "" if self.task is None else f"{self.task}"
            self.timeline.append(Line(self.now, who, what, f"{answer}"))

    # ---- processes ----------------------------------------------------------------

    def start(
        self,
        name: str,
        program: Callable[[], object],
        *,
        machine: str = "m1",
        after: float = 0.0,
    ) -> Process:
        """Starts a process that runs `program` in `after` seconds."""
        process = Process(self, name, 1000 + len(self.processes), machine)
        self.processes[process.pid] = process
        self.spawn(process, program, "main", after=after)
        return process

    def spawn(
        self,
        process: Process,
        run: Callable[[], object],
        name: str,
        *,
        is_daemon: bool = False,
        after: float = 0.0,
    ) -> Task:
        """Starts a task of a process."""
        task = Task(process, run, name, is_daemon)
        process.tasks.append(task)
        self._all_tasks.append(task)
        self._schedule(self.now + after, task, True)
        return task

    def crash(self, process: Process) -> None:
        """Ends a process between two effects: none of its tasks runs again."""
        if not process.is_alive:
            return
        self.record(f"{process} crashes")
        process.is_alive = False
        for task in process.tasks:
            self.wake_all(task.joining)
        process.tasks.clear()
        if self.task is not None and self.task.process is process:
            self.hub.switch()
            raise Killed

    def pause(self, process: Process, secs: float) -> None:
        """Lets no task of a process run for `secs` seconds."""
        self.record(f"{process} pauses for {secs:.1f} s")
        process.paused_until = max(process.paused_until, self.now + secs)

    def _end(self, task: Task) -> None:
        task.is_ended = True
        process = task.process
        if not process.is_alive:
            return
        process.tasks.remove(task)
        self.wake_all(task.joining)
        if all(other.is_daemon for other in process.tasks):
            self.record(f"{process} ends")
            process.is_alive = False
            process.tasks.clear()

    # ---- waiting ------------------------------------------------------------------

    def point(self, what: str = "", *, may_pause: bool = True) -> None:
        """Lets others run that are due now; the process may crash or pause here.

        Without `may_pause`, nobody else runs: another task may pause the process.
        """
        process = self._running().process
        process.points += 1
        if may_pause and process.pauses and min(process.pauses) <= process.points:
            self.pause(process, process.pauses.pop(min(process.pauses)))
        if process.crash_after is not None:
            process.crash_after -= 1
            if process.crash_after < 0:
                self.crash(process)
        if not may_pause:
            return
        is_paused = process.paused_until > self.now
        if is_paused or (self._agenda and self._agenda[0][0] <= self.now):
            self.wait(what, 0.0)

    def wait(self, what: str, secs: float | None = None) -> bool:
        """Suspends the running task; returns False if nobody woke it in `secs`."""
        task = self._running()
        task.waits_for = what
        if secs is not None:
            self._schedule(self.now + max(secs, 0.0), task, False)
        self.task = None
        following = self._take()
        if following is None:
            woken = self.hub.switch()
        elif following[0] is task:
            woken = following[1]
        else:  # one switch; by way of the hub, there would be two
            woken = following[0].greenlet.switch(following[1])
        self._running()
        return woken

    def ticket(self) -> Ticket:
        """Returns the ticket of the next wait of the running task, for `wake`."""
        task = self._running()
        return Ticket(task, task.turn)

    def wake(self, ticket: Ticket) -> None:
        """Ends a wait, unless it is over."""
        if ticket.is_valid():
            self._schedule(self.now, ticket.task, True)

    def wake_all(self, tickets: list[Ticket]) -> None:
        """Ends all waits of a list, and empties the list."""
        for ticket in tickets:
            self.wake(ticket)
        tickets.clear()

    def sleep(self, secs: float) -> None:
        """Suspends the running task for `secs` seconds."""
        self.wait(f"sleep {secs:g} s", secs)

    def at(self, secs: float, action: Callable[[], object]) -> None:
        """Calls `action` in `secs` seconds, outside of tasks."""
        self._pending_actions += 1
        entry = (self.now + secs, self.random.random(), next(self._numbers), action)
        heapq.heappush(self._agenda, (*entry, 0, False))

    def _running(self) -> Task:
        """Returns the running task; raises Killed if its process is dead."""
        task = self.task
        if task is None:
            raise RuntimeError("only a task can wait")
        if self._is_closed or not task.process.is_alive:
            raise Killed
        return task

    def _schedule(self, when: float, task: Task, woken: bool) -> None:
        entry = (when, self.random.random(), next(self._numbers), task)
        heapq.heappush(self._agenda, (*entry, task.turn, woken))

    # ---- the scheduler ------------------------------------------------------------

    def run(
        self, limit_secs: float = LIMIT_SECS, limit_events: int = LIMIT_EVENTS
    ) -> None:
        """Runs until all processes have ended and no action is left.

        Raises:
            Violation: A task ended with an error, or waits for ever.
        """
        self._end_secs, self._events_left = self.now + limit_secs, limit_events
        while self._is_busy():
            if not self._agenda or self._is_over():
                raise Violation(f"does not end: {self._waiting()}")
            self._next()
            if self.errors:
                task, error = self.errors[0]
                raise Violation(f"{task} raised {error!r}") from error

    def run_last(
        self, program: Callable[[], object], limit_secs: float = LIMIT_SECS
    ) -> None:
        """Runs a last process, when all others have ended."""
        self.record("all processes have ended")
        self.start("last", program)
        self.run(limit_secs)

    def _is_busy(self) -> bool:
        return self._pending_actions > 0 or any(
            process.tasks for process in self.processes.values()
        )

    def _is_over(self) -> bool:
        return self.now > self._end_secs or self._events_left < 0

    def _next(self) -> None:
        """Runs the next task until the hub's turn has come, or the next action."""
        following = self._take()
        if following is not None:
            task, woken = following
            task.greenlet.switch(woken)
            self.task = None
        elif self._agenda and not self._is_over():
            self.now, *_, action, _, _ = heapq.heappop(self._agenda)
            self._events_left -= 1
            self._pending_actions -= 1
            action()

    def _take(self) -> tuple[Task, bool] | None:
        """Takes the next task from the agenda, and whether it was woken.

        Returns:
            None if the hub has to decide: an action is next, or the time is over.
        """
        agenda = self._agenda
        while agenda and isinstance(agenda[0][3], Task) and not self._is_over():
            self._events_left -= 1
            when, _, _, task, turn, woken = heapq.heappop(agenda)
            process = task.process
            if turn != task.turn or task.is_ended or not process.is_alive:
                continue
            if process.paused_until > when:
                self._schedule(process.paused_until, task, woken)
                continue
            self.now = when
            task.turn += 1
            task.waits_for = ""
            self._load(process)
            self.task = task
            return task, woken
        return None

    def _load(self, process: Process) -> None:
        if self._loaded is not process:
            if self._loaded is not None:
                self._loaded.state.keep()
            process.state.load()
            self._loaded = process

    def _waiting(self) -> str:
        """Describes the tasks that the world waits for."""
        tasks = [t for p in self.processes.values() for t in p.tasks if not t.is_daemon]
        return ", ".join(f"{task} waits for {task.waits_for}" for task in tasks)


_current: World | None = None


def current() -> World | None:
    """Returns the world that runs; None outside of worlds, and on real threads.

    Threads of other tests, such as heartbeats, may outlive them.
    """
    world = _current
    if world is None or world.thread != threading.get_ident():
        return None
    return world
