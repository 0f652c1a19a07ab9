"""A simulated object store: requests are slow, lost, late, repeated, or fail.

`SimulatedConnection` stands in for flaxckpt's `Connection` to a bucket: its deadlines,
retries and errors stay, only TensorStore's `KvStore` is replaced. Every request is a
point where the process may crash; what is under way then still arrives.

A request that was answered has no effect later. Of a deletion without a condition,
which no store can refuse, FORMAT.md assumes more: it arrives before the death of its
sender, and the sender does not pause right before it sends it.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from flaxckpt._storage import bucket
from flaxckpt._storage.store_requests import Connection
from verification.simulation import kernel


class Weather(NamedTuple):
    """Chances of faults, per request, in one history.

    Attributes:
        slow: The answer takes up to `slowest_secs`.
        slowest_secs: The longest time for a request that is not lost or late.
        lost_request: The request never arrives.
        lost_answer: The request takes effect, and the answer never comes.
        late: A write takes effect up to `latest_secs` later, without an answer.
        latest_secs: The latest time at which a late write arrives.
        repeated: A write arrives twice, the second time up to `slowest_secs` later, and
            the answer is that of the second.
        fails: The store answers with a temporary error, with or without an effect.
    """

    slow: float = 0.0
    slowest_secs: float = 20.0
    lost_request: float = 0.0
    lost_answer: float = 0.0
    late: float = 0.0
    latest_secs: float = 30.0
    repeated: float = 0.0
    fails: float = 0.0


_ERRORS = (
    "UNAVAILABLE: 503 service unavailable",
    "RESOURCE_EXHAUSTED: 429 slow down",
    "UNAVAILABLE: 500 internal error",
)


class Stamp(NamedTuple):
    """What TensorStore calls a timestamped generation."""

    generation: bytes


class ReadResult(NamedTuple):
    """What TensorStore returns for a read."""

    state: str
    value: bytes
    stamp: Stamp


class Answer:
    """The future of a request, waited for in virtual time."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._answer: object = None
        self._error: Exception | None = None
        self._is_there = False
        self._waiting: list[kernel.Ticket] = []

    def arrive(self, answer: object) -> None:
        """Ends the wait for the answer; an exception is raised there."""
        if not self._is_there:
            self._answer, self._is_there = answer, True
            kernel.current().wake_all(self._waiting)

    def result(self, timeout: float | None = None) -> Any:
        """Returns the answer, or raises TimeoutError after `timeout` seconds."""
        world = kernel.current()
        if not self._is_there:
            self._waiting.append(world.ticket())
            world.wait(self.what, timeout)
        world.point(f"answer to {self.what}")
        if not self._is_there:
            world.record(self.what, "no answer in time")
            raise TimeoutError
        world.record(self.what, _describe(self._answer))
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


Kind = Literal["read", "write", "delete"]
"""What a request does; a conditional delete counts as a write."""


class Request(NamedTuple):
    """A request on its way."""

    kind: Kind
    what: str
    effect: Callable[[], object]
    sender: kernel.Process
    purpose: object
    answer: Answer


class Store:
    """The true content of a bucket, and the requests on their way.

    Args:
        world: The world.
        weather: The chances of faults.

    Attributes:
        objects: Key -> content and generation.
        weather: The chances of faults; it may change.
        on_change: Called after each change with the key.
        on_send: Called when a request is sent; returns its purpose.
        purpose: The purpose of the request that takes effect.
        cut_off: PIDs of processes that cannot reach the store.
        dies_writing: PID of the process that crashes right after it has sent a write.
    """

    def __init__(self, world: kernel.World, weather: Weather) -> None:
        self.objects: dict[str, tuple[bytes, bytes]] = {}
        self.weather = weather
        self.on_change: Callable[[str], object] = lambda key: None
        self.on_send: Callable[[], object] = lambda: None
        self.purpose: object = None
        self.cut_off: set[int] = set()
        self._world = world
        self._generations = itertools.count(1)
        self.dies_writing: int | None = None
        self._writes_left = 0
        self._restart: Callable[[kernel.Process, float], object]
        # Apart, so that histories without such a crash remain as they were.
        self._last_write = random.Random(f"{world.seed} last write")

    def draw_last_write(
        self, restart: Callable[[kernel.Process, float], object]
    ) -> None:
        """Perhaps lets a process crash right after it has sent a write.

        The write arrives late, when others may have taken over.

        Args:
            restart: Called with the process, starts it again in a number of seconds.
        """
        rng = self._last_write
        if rng.random() < 0.3:
            self._restart = restart
            self.dies_writing = rng.choice([*self._world.processes])
            self._writes_left = rng.randint(1, 40)

    # ---- what a KvStore does ------------------------------------------------------

    def read(self, key: str, byte_range: slice | None = None) -> Answer:
        """Reads a value, or a range of its bytes."""
        part = "" if byte_range is None else f" [{byte_range.start}:{byte_range.stop}]"
        return self._send(
            "read", f"read {key}{part}", lambda: self._read(key, byte_range)
        )

    def list(self, key_range: Any) -> Answer:
        """Lists the keys of a range."""
        start, end = key_range.inclusive_min, key_range.exclusive_max
        return self._send(
            "read", f"list {_text(start)}", lambda: self._list(_text(start), _text(end))
        )

    def write(
        self, key: str, value: bytes | None, if_equal: bytes | None = None
    ) -> Answer:
        """Writes or deletes a value, perhaps only a certain generation."""
        verb: Kind = "delete" if value is None else "write"
        what, kind = f"{verb} {key}", verb
        if if_equal is not None:
            condition = (
                " if missing" if if_equal == bucket._nothing() else " if unchanged"
            )
            what, kind = what + condition, "write"
        return self._send(kind, what, lambda: self._write(key, value, if_equal))

    # ---- effects ------------------------------------------------------------------

    def _read(self, key: str, byte_range: slice | None) -> ReadResult | Exception:
        if key not in self.objects:
            return ReadResult("missing", b"", Stamp(bucket._nothing()))
        value, generation = self.objects[key]
        if byte_range is not None:
            start, stop = byte_range.start or 0, byte_range.stop
            if start > len(value) or (stop or 0) > len(value):
                return ValueError("OUT_OF_RANGE: beyond the end of the value")
            value = value[start:stop]
        return ReadResult("value", value, Stamp(generation))

    def _list(self, start: str, end: str) -> "list[bytes]":
        return [
            key.encode()
            for key in self.objects
            if key >= start and (not end or key < end)
        ]

    def _write(self, key: str, value: bytes | None, if_equal: bytes | None) -> Stamp:
        present = self.objects.get(key)
        generation = bucket._nothing() if present is None else present[1]
        if if_equal is not None and if_equal != generation:
            return Stamp(b"")
        if value is None:
            self.objects.pop(key, None)
            new = bucket._nothing()
        else:
            new = b"g%d" % next(self._generations)
            self.objects[key] = (value, new)
        if (present is None) != (value is None) or value is not None:
            self.on_change(key)
        return Stamp(new)

    # ---- the way there and back ---------------------------------------------------

    def _send(self, kind: Kind, what: str, effect: Callable[[], object]) -> Answer:
        """Sends a request; the weather decides what becomes of it."""
        world, weather = self._world, self.weather
        if kind == "write" and world.task.process.pid == self.dies_writing:
            self._writes_left -= 1
            if not self._writes_left:
                self._send_last(what, effect)
        world.point(what, may_pause=kind != "delete")
        request = Request(
            kind, what, effect, world.task.process, self.on_send(), Answer(what)
        )
        draw = world.random.random
        there, back = 0.005 + 0.05 * draw(), 0.005 + 0.05 * draw()
        faults = ("lost_request", "slow", "fails", "lost_answer", "late", "repeated")
        chances = [getattr(weather, fault) for fault in faults]
        (fault,) = world.random.choices(("", *faults), (1 - sum(chances), *chances))
        if fault in ("late", "repeated") and kind != "write":
            fault = ""
        if world.task.process.pid in self.cut_off:
            fault = "lost_request"
        match fault:
            case "lost_request":
                world.record(what, "(the request is lost)")
            case "slow":
                there, back = (
                    weather.slowest_secs * draw(),
                    weather.slowest_secs * draw(),
                )
                self._deliver(request, there, back)
            case "fails":
                error = ValueError(_ERRORS[int(draw() * len(_ERRORS))])
                has_effect = kind != "read" and draw() < 0.5
                self._deliver(request, there, back, has_effect=has_effect, error=error)
            case "lost_answer":
                self._deliver(request, there, None)
            case "late":
                self._deliver(request, weather.latest_secs * draw(), None)
            case "repeated":
                again = weather.slowest_secs * draw()
                self._deliver(request, min(there, again), None)
                self._deliver(request, max(there, again), back)
            case _:
                self._deliver(request, there, back)
        return request.answer

    def _send_last(self, what: str, effect: Callable[[], object]) -> None:
        """Sends a write that arrives late, and lets the process crash."""
        world, draw = self._world, self._last_write.random
        process, purpose = world.task.process, self.on_send()
        world.record(what, "(sent right before the crash)")
        request = Request("write", what, effect, process, purpose, Answer(what))
        self._deliver(request, self.weather.latest_secs * draw(), None)
        self._restart(process, 10 * draw())
        world.crash(process)

    def _deliver(
        self,
        request: Request,
        there: float,
        back: float | None,
        *,
        has_effect: bool = True,
        error: Exception | None = None,
    ) -> None:
        """Lets a request take effect in `there`, and answers `back` seconds later."""
        world = self._world

        def arrive() -> None:
            if request.kind == "delete" and not request.sender.is_alive:
                return
            self.purpose = request.purpose
            result = request.effect() if has_effect else None
            if there > 1 or error is not None:
                world.record(f"({request.what} arrives)", _describe(result))
            if back is not None:
                world.at(back, lambda: request.answer.arrive(error or result))

        world.at(there, arrive)


def _text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key


def _describe(answer: object) -> str:
    match answer:
        case ReadResult(state="missing"):
            return "missing"
        case ReadResult(value=value):
            return f"{value[:40]!r}"
        case Stamp(generation=b""):
            return "refused: it has changed"
        case Stamp():
            return "done"
        case None:
            return "no effect"
    return f"{answer}"[:60]


class SimulatedConnection(Connection):
    """Flaxckpt's connection to a bucket, in the world that runs."""

    def kv(self) -> Any:
        return kernel.current().shared[self.url]


PATCHES = {(bucket, "Connection"): SimulatedConnection}
"""For `stand_ins.installed`."""


def open_store(world: kernel.World, url: str, weather: Weather) -> Store:
    """Makes the bucket `url`, `memory://name`, of a world."""
    bucket._nothing()  # opened once, outside of tasks
    store = world.shared[url] = Store(world, weather)
    return store
