"""Reads metrics from TensorBoard event files, named as in T5X."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import crc32c
import numpy as np

from flaxckpt import errors
from flaxckpt._types import PathLike

try:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto import event_pb2
    from tensorboard.util import tensor_util
except ImportError as error:
    raise errors.OptionError(
        f"event files cannot be read without TensorBoard ({error}); TensorFlow is not"
        " needed:\n  pip install 'flaxckpt[tensorboard]'"
    ) from error

__all__ = ["EventFiles"]

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<QI")  # length of the event, checksum of the length
_CHECKSUM = struct.Struct("<I")


class EventFiles:
    """The scalars in all event files under a directory, by step.

    ```python
    ckpt = Checkpointer(
        "run",
        keep=[BestN(1, "eval/loss", mode="min")],
        metrics_from=EventFiles("run/tensorboard"),
    )
    ```

    Metrics are named as in T5X: the directory of the event file, relative to `log_dir`,
    then the tag. So `loss`, written below `log_dir/eval`, is `eval/loss`. Of several
    events for a step, the last event of the newest file counts. Each call reads only
    new events; TensorFlow is never imported. A damaged file is read up to the damage,
    with a warning.

    Args:
        log_dir: The directory of the event files; it may be created later.
    """

    def __init__(self, log_dir: PathLike) -> None:
        self._log_dir = Path(log_dir)
        self._read_to: dict[Path, int] = {}
        self._damaged: set[Path] = set()
        self._scalars: dict[int, dict[str, float]] = {}

    def __call__(self) -> Mapping[int, Mapping[str, float]]:
        """Reads new events.

        Returns:
            Step -> name -> value, of every step ever written.

        Raises:
            OSError: An event file cannot be read.
        """
        if not self._log_dir.is_dir():
            _log.warning(
                "%s does not exist: no metrics are read from it", self._log_dir
            )
        # Names contain the creation time of a file: the newest is last.
        for file in sorted(self._log_dir.rglob("*tfevents*")):
            if file.is_file() and file not in self._damaged:
                self._read(file)
        return MappingProxyType(self._scalars)

    def _read(self, file: Path) -> None:
        run = file.parent.relative_to(self._log_dir).as_posix()
        prefix = "" if run == "." else f"{run}/"
        with file.open("rb") as opened:
            opened.seek(self._read_to.get(file, 0))
            try:
                for event in _events(opened):
                    values = {
                        prefix + value.tag: scalar
                        for value in event.summary.value
                        if (scalar := _scalar(value)) is not None
                    }
                    if values:
                        self._scalars.setdefault(event.step, {}).update(values)
                    self._read_to[file] = opened.tell()
            except (ValueError, DecodeError) as error:
                self._damaged.add(file)
                _log.warning(
                    "%s is damaged after %d bytes (%s): later metrics are not read",
                    file,
                    self._read_to.get(file, 0),
                    error,
                )


def _events(file: BinaryIO) -> Iterator[Any]:
    """Yields all complete events; stops at an event that is still being written."""
    size = os.fstat(file.fileno()).st_size
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        length, checksum = _HEADER.unpack(header)
        if checksum != _masked_crc(header[:8]):
            raise ValueError("the checksum of a length is wrong")
        if length + _CHECKSUM.size > size - file.tell():
            return
        body = file.read(length + _CHECKSUM.size)
        if _CHECKSUM.unpack(body[length:]) != (_masked_crc(body[:length]),):
            raise ValueError("the checksum of an event is wrong")
        yield event_pb2.Event.FromString(body[:length])


def _masked_crc(data: bytes) -> int:
    """Returns the masked CRC-32C of TFRecord files."""
    crc = crc32c.crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _scalar(value: Any) -> float | None:
    """Returns the number in a summary of old or new writers, or None."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.tensor.tensor_shape.dim:
        return None
    try:
        array = tensor_util.make_ndarray(value.tensor)
    except (TypeError, ValueError):
        return None  # a placeholder without a value, or not a numeric type
    is_number = array.size == 1 and np.issubdtype(array.dtype, np.number)
    return float(array.item()) if is_number and not np.iscomplexobj(array) else None
