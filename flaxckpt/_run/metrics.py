"""Metrics and save times of steps, as seen by policies."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from flaxckpt import _formats, _storage, _util, errors

_log = logging.getLogger(__name__)

METRICS_FILE = f"{_formats.items.METRICS}/{_formats.items.METRICS}"

T = TypeVar("T")
MetricsByStep: TypeAlias = Mapping[int, Mapping[str, float]]


class FileCache(Generic[T]):
    """Cache of a value read from a small file of each step, until the file changes."""

    def __init__(self, file: str, read: Callable[[Path], T]) -> None:
        self._file = file
        self._read = read
        self._values: dict[Path, tuple[_storage.Stamp, T]] = {}

    def __call__(self, path: Path) -> T:
        return self.read(path)[1]

    def read(self, path: Path) -> tuple[_storage.Stamp, T]:
        stamp = _storage.stamp(path / self._file)
        cached = self._values.get(path)
        if cached is None or cached[0] != stamp:
            cached = self._values[path] = (stamp, self._read(path))
        return cached

    def forget(self, *, all_but: Collection[Path] = ()) -> None:
        for path in list(self._values):  # other threads may add to it
            if path not in all_but:
                self._values.pop(path, None)


def read_metrics(path: Path, step: int | None) -> dict[str, float] | None:
    try:
        content = _formats.native_metadata.load_metrics(path, step)
        return _formats.native_metadata.flatten_metrics(content)
    except (errors.DamagedCheckpointError, OSError) as error:
        _log.warning("the metrics of %s cannot be read: %s", path, error)
        return None


def parse_by_step(by_step: object) -> dict[int, dict[str, float]]:
    """Returns metrics by int step, also from text; raises OptionError for others."""
    if not isinstance(by_step, Mapping):
        raise errors.OptionError(
            f"metrics_from must return step -> name -> number, got {by_step!r:.80}"
        )
    numbers: dict[int, dict[str, float]] = {}
    for key, metrics in by_step.items():
        try:
            is_text = isinstance(key, str) and key.isascii() and key.isdigit()
            step = int(key) if is_text else operator.index(key)
        except (TypeError, ValueError):
            raise errors.OptionError(
                f"the keys returned by metrics_from must be steps, got {key!r:.80}"
            ) from None
        numbers[step] = as_metrics(metrics)
    return numbers


def as_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns a flat dict of metrics, with nested names joined by `/`.

    Raises OptionError for a metric that is not a single number, for equal names, and if
    the JSON exceeds the limit of readers.
    """
    if not isinstance(metrics, Mapping | None):
        raise errors.OptionError(
            "metrics must be numbers by name, such as {'loss': 0.5}, got"
            f" {metrics!r:.80}"
        )
    flat: dict[str, float] = {}
    try:
        _add_metrics(flat, metrics or {}, "", 0)
        _formats.orbax_json.check_size(_formats.orbax_json.dumps(flat))
    except errors.OptionError:
        raise
    except ValueError as error:
        raise errors.OptionError(
            f"the metrics cannot be saved: {errors.printable(str(error))}"
        ) from None
    return flat


def _add_metrics(
    flat: dict[str, float], metrics: Mapping[Any, Any], prefix: str, depth: int
) -> None:
    if depth > _util.json_limits.MAX_DEPTH:
        raise errors.OptionError(
            f"the metrics {prefix[:80]!r} contain themselves, or are nested more than"
            f" {_util.json_limits.MAX_DEPTH} levels deep"
        )
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise errors.OptionError(
                f"names of metrics must be str, got {key!r:.80}: write str({key!r:.80})"
            )
        name = f"{prefix}{_util.json_limits.check_text(key, 'a name')}"
        if isinstance(value, Mapping):
            _add_metrics(flat, value, f"{name}/", depth + 1)
            continue
        if name in flat:
            raise errors.OptionError(
                f"two metrics are named {name!r:.80}, one of them nested: rename one"
            )
        try:
            if isinstance(value, str | bytes | bytearray):  # float() would accept these
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise errors.OptionError(
                f"the metric {name!r:.80} must be a single number, got {value!r:.80}"
            ) from None
        flat[name] = number
