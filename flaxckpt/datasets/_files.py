"""Reads and writes the files with the dataset iterators' states."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import _util, errors
from flaxckpt.datasets import (
    _adapters,
    _diagnostics,
    _duck_types,
    _json_codec,
    _names,
    _shards,
)
from flaxckpt.datasets._buffered import Buffered
from flaxckpt.datasets._iterators import Restarting

_log = logging.getLogger(__name__)

DESCRIPTION = "metadata"
"""The file of our description of the iterator, which Orbax's JSON reader expects.

With several processes, the first process writes it.
"""


def state_files(dataset: Any) -> dict[str, bytes]:
    """Returns the current state of `dataset` as files, by name.

    They are this process's states in the format of grain and Orbax, and a description
    of the states. Of several iterators, those of process K of M are the parts K, K + M,
    … of the data. Raises DatasetStateError if an iterator returns no state, or one that
    cannot be written.
    """
    iterators, _ = _iterators(dataset)
    states = [_state(iterator) for iterator in iterators]
    as_bytes = all(isinstance(state, bytes) for state in states)
    names = _names.state_names(len(iterators))
    files: dict[str, bytes] = {}
    for name, iterator, state in zip(names, iterators, states, strict=True):
        files[name] = _content(iterator, state, as_bytes=as_bytes)
    if _shards.has_shards(iterators):
        files.update(_shard_files(iterators[0]))
    first = _innermost(iterators[0])
    description = {
        "adapter": _adapters.find(first).name,
        "type": _duck_types.type_name(first),
        "is_bytes": as_bytes,
        "codec": _json_codec.VERSION,
        "process_count": _util.processes.process_count(),
        "version": _duck_types.version(first),
    }
    files[DESCRIPTION] = json.dumps(description).encode()
    return files


def set_state(
    dataset: Any, files: Mapping[str, bytes], *, path: Path, is_whole: bool = False
) -> None:
    """Restores the saved position of `dataset`, of the same kind over the same data.

    `files` are the result of `state_files`, or were written by Orbax and grain; with
    `is_whole`, they are all that were saved. Raises DatasetStateError if an iterator
    rejects the state, or if another number of processes saved it, and
    DamagedCheckpointError if the state of a process may have been lost.
    """
    iterators, restarting = _iterators(dataset)
    adapters = [_adapters.find(iterator) for iterator in iterators]
    description = _read_description(files)
    try:
        names = _shards.choose(iterators, files, path, is_whole)
    except errors.DatasetStateError as error:
        if not restarting:
            raise
        _log.warning("the data starts from the beginning: %s", error)
        return
    _warn_of_version(_innermost(iterators[0]), description, path)
    _warn_of_class(_innermost(iterators[0]), description, path)
    saved_by = errors.printable(str(description.get("type", "by Orbax")))
    for iterator in iterators:
        _diagnostics.warn_of_traps(_innermost(iterator))
    states: list[Any] = []
    at = iterators[0]
    try:
        if names is None:
            _set_shards(iterators[0], files, description)
            return
        for at, adapter, name in zip(iterators, adapters, names, strict=True):
            states.append(_decode(at, adapter, files[name], description))
        for at, adapter, state in zip(iterators, adapters, states, strict=True):
            adapter.set_state(at, state)
    except errors.DatasetStateError:
        raise
    except Exception as error:
        raise _diagnostics.set_state_error(
            _innermost(at), error, saved_by=saved_by, path=path
        ) from error


def _iterators(dataset: Any) -> tuple[Sequence[Any], bool]:
    """Returns the iterators of this process, and True if they may restart."""
    restarting = isinstance(dataset, Restarting)
    if restarting:
        dataset = dataset.iterator
    if isinstance(dataset, list | tuple) and not dataset:
        raise errors.DatasetStateError("wanted dataset iterators, found an empty list")
    return (dataset if isinstance(dataset, list | tuple) else [dataset]), restarting


def _innermost(iterator: Any) -> Any:
    while isinstance(iterator, Buffered):
        iterator = iterator.iterator
    return iterator


# ---- one state ------------------------------------------------------------------


def _state(iterator: Any) -> Any:
    adapter = _adapters.find(iterator)
    _diagnostics.warn_of_traps(_innermost(iterator))
    try:
        return adapter.get_state(iterator)
    except errors.DatasetStateError:
        raise
    except Exception as error:
        raise _diagnostics.get_state_error(_innermost(iterator), error) from error


def _content(iterator: Any, state: Any, *, as_bytes: bool = False) -> bytes:
    try:
        if as_bytes and _json_codec.is_own_json(state):
            content: bytes = state
        else:
            content = _json_codec.dumps(state)
        _json_codec.check_size(content)
    except Exception as error:
        advice = "Return only what is wanted from get_state, or pass dataset=None."
        raise _diagnostics.get_state_error(
            _innermost(iterator), error, advice
        ) from error
    _diagnostics.warn_of_size(_innermost(iterator), len(content))
    return content


def _decode(
    iterator: Any,
    adapter: _adapters.Adapter,
    content: bytes,
    description: Mapping[str, Any],
) -> Any:
    # Without our description, the type of the iterator's own state decides.
    as_bytes = description.get("is_bytes")
    if as_bytes is None:
        as_bytes = isinstance(adapter.get_state(iterator), bytes)
    is_raw = description.get("is_raw", as_bytes and _json_codec.is_own_json(content))
    state = (
        content
        if is_raw
        else _json_codec.loads(content, version=_codec_version(description))
    )
    if as_bytes and not isinstance(state, bytes):
        raise TypeError(f"wanted bytes, found {type(state).__name__}")
    return state


def _codec_version(description: Mapping[str, Any]) -> int:
    """Returns the codec version: 1 for the first releases, 0 for Orbax."""
    return int(description.get("codec", 1 if description else 0))


def _read_description(files: Mapping[str, bytes]) -> dict[str, Any]:
    content = files.get(DESCRIPTION, b"{}")
    try:
        _json_codec.check_size(content)
        description = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return description if isinstance(description, dict) else {}


def _warn_of_version(iterator: Any, description: Mapping[str, Any], path: Path) -> None:
    now, saved = _duck_types.version(iterator), description.get("version")
    is_same = str(description.get("type")).startswith(
        f"{_duck_types.package(iterator)}."
    )
    if is_same and now and saved and now != saved:
        _log.warning(
            "the dataset state in %s was saved by %s %s; version %s may read it"
            " differently: compare the first batches",
            path,
            _duck_types.package(iterator),
            errors.printable(str(saved)),
            now,
        )


def _warn_of_class(iterator: Any, description: Mapping[str, Any], path: Path) -> None:
    """Logs a warning about the state of a class of another name and package.

    Many states have one form, such as an index: all of these classes accept it.
    """
    saved, now = str(description.get("type", "")), _duck_types.type_name(iterator)
    is_moved = saved.rpartition(".")[2] == now.rpartition(".")[2]
    if saved and not is_moved and saved.partition(".")[0] != now.partition(".")[0]:
        _log.warning(
            "the dataset state in %s was saved by %s; %s may read it differently:"
            " compare the first batches",
            path,
            errors.printable(saved),
            now,
        )


# ---- shards ---------------------------------------------------------------------


def _shard_files(iterator: Any) -> dict[str, bytes]:
    try:
        states = list(iterator.get_shard_states())
    except Exception as error:
        raise _diagnostics.get_state_error(iterator, error) from error
    return {
        _shards.shard_name(i): _content(iterator, state)
        for i, state in enumerate(states)
    }


def _set_shards(
    iterator: Any, files: Mapping[str, bytes], description: Mapping[str, Any]
) -> None:
    names = _shards.shard_names(iterator, files)
    version = _codec_version(description)
    iterator.set_shard_states(
        [_json_codec.loads(files[n], version=version) for n in names]
    )
