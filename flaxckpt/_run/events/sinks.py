"""Event sinks: functions, and loggers recognized by their methods."""

from __future__ import annotations

import collections
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from flaxckpt import _util, errors
from flaxckpt._steps.event import Event

_log = logging.getLogger(__name__)

Sink: TypeAlias = Any
"""An object with `write_scalars`, `log_metrics`, `add_scalar` or `log`, or a function
of an `Event`."""


class Teller:
    """Sends events to a sink, and logs the first exception of the sink.

    Attributes:
        sink: The sink.
        failures: Number of exceptions of the sink.

    Raises:
        OptionError: `sink` is not a sink.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.failures = 0
        self._tell = _telling(sink)

    def close(self) -> None:
        """Logs the number of failures if the sink failed more than once."""
        if self.failures > 1:
            _log.warning("%s failed %d more times", self.name, self.failures - 1)
            self.failures = 1

    @property
    def name(self) -> str:
        """Name of the sink, for messages."""
        name = getattr(self.sink, "__qualname__", type(self.sink).__qualname__)
        return f"the event sink {name}"

    def __call__(self, event: Event, step: int) -> None:
        try:
            self._tell(event, step)
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                _log.warning(
                    "%s failed; checkpoints are not affected:",
                    self.name,
                    exc_info=error,
                )


def listed(sinks: Iterable[Sink]) -> tuple[Sink, ...]:
    """Returns the sinks as a tuple.

    Raises:
        OptionError: `sinks` is not a list of sinks.
    """
    if not _util.arguments.is_list(sinks):
        raise errors.OptionError(
            f"sinks must be a list, got {_util.arguments.describe(sinks)}: write"
            " sinks=[sink]"
        )
    return tuple(sinks)


def check(sink: Sink) -> None:
    """Raises an error for an object that cannot receive events.

    Raises:
        OptionError: `sink` is not a sink.
    """
    _telling(sink)


def is_same(sink: Sink, other: Sink) -> bool:
    """Returns True for the same sink, also for two objects of a bound method."""
    return sink is other or bool(inspect.isroutine(sink) and sink == other)


class _Shape(NamedTuple):
    """Interface of a kind of loggers.

    Attributes:
        method: Name of the method of these loggers.
        tell: Logs scalars at a step.
    """

    method: str
    tell: Callable[[Any, dict[str, float], int], object]


def _add_each(writer: Any, scalars: dict[str, float], step: int) -> None:
    for tag, value in scalars.items():
        writer.add_scalar(tag, value, step)


_SHAPES = (
    _Shape("write_scalars", lambda sink, values, at: sink.write_scalars(at, values)),
    _Shape("log_metrics", lambda sink, values, at: sink.log_metrics(values, step=at)),
    _Shape("add_scalar", _add_each),
    _Shape("log", lambda sink, values, at: sink.log(values, step=at)),
)


def _telling(sink: Sink) -> Callable[[Event, int], object]:
    # A class is not yet a sink, and the standard library's loggers have a `log`, too.
    if not isinstance(sink, type | logging.Logger):
        for shape in _SHAPES:
            if callable(getattr(sink, shape.method, None)):
                return _Scalars(sink, shape.tell)
        if callable(sink):
            return lambda event, step: sink(event)
    raise errors.OptionError(
        f"{sink!r:.80} is not an event sink; wanted one of\n"
        "  a function of a flaxckpt.Event\n"
        "  a clu writer: write_scalars(step, dict)\n"
        "  a W&B run: log(dict, step=)\n"
        "  an MLflow module: log_metrics(dict, step=)\n"
        "  a TensorBoard writer: add_scalar(tag, value, step)"
    )


_COUNTED = frozenset(("deleted", "failed", "fell_back", "skipped"))


class _Scalars:
    """Converts events to numbers for a logger."""

    def __init__(
        self, sink: Sink, tell: Callable[[Any, dict[str, float], int], object]
    ) -> None:
        self._sink = sink
        self._tell = tell
        self._counts: collections.Counter[str] = collections.Counter()

    def __call__(self, event: Event, step: int) -> None:
        scalars = self._of(event)
        if scalars:
            named = {f"checkpoint/{name}": value for name, value in scalars.items()}
            self._tell(self._sink, named, step)

    def _of(self, event: Event) -> dict[str, float]:
        if event.kind in _COUNTED:
            self._counts[event.kind] += 1
            return {event.kind: self._counts[event.kind]}
        match event.kind, event.details:
            case "snapshot", {"blocked_secs": float(blocked)}:
                return {"blocked_secs": blocked}
            case "committed", {"total_secs": float(secs), "bytes": int(size)}:
                rate = size / secs if secs else 0.0
                return {"total_secs": secs, "bytes": size, "bytes_per_sec": rate}
            case "uploaded", {"secs": float(secs)}:
                return {"upload_secs": secs}
            case "restored", {"secs": float(secs)}:
                return {"restore_secs": secs}
        return {}
