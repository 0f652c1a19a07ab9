"""Reads and writes the files with the dataset iterators' states."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import _util, errors
from flaxckpt.datasets import _adapters, _diagnostics, _duck_types, _json_codec, _shards
from flaxckpt.datasets._buffered import Buffered
from flaxckpt.datasets._iterators import Restarting

_log = logging.getLogger(__name__)

DESCRIPTION = "metadata"
"""The file of our description of the iterator, which Orbax's JSON reader expects.

With several processes, the first process writes it.
"""


def state_files(dataset: Any) -> dict[str, bytes]:
    """Returns the current state of `dataset` as files.

    Args:
        dataset: An iterator, `Restarting(iterator)`, or a list of several iterators:
            those of process K of M are the parts K, K + M, … of the data.

    Returns:
        File name -> content: this process's states in the format of grain and Orbax,
        and a description of the states.

    Raises:
        DatasetStateError: An iterator returns no state, or a state that cannot be
            written.
    """
    iterators, _ = _iterators(dataset)
    states = [_state(iterator) for iterator in iterators]
    as_bytes = all(isinstance(state, bytes) for state in states)
    names = _shards.own_names(len(iterators))
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


def set_state(dataset: Any, files: Mapping[str, bytes], *, path: Path) -> None:
    """Restores the saved position of `dataset`.

    Args:
        dataset: Of the same kind, over the same data.
        files: The result of `state_files`, or files written by Orbax and grain.
        path: The checkpoint, for messages.

    Raises:
        DatasetStateError: An iterator rejects the state, or another number of processes
            saved it.
        DamagedCheckpointError: The state of a process is missing.
    """
    iterators, restarting = _iterators(dataset)
    adapters = [_adapters.find(iterator) for iterator in iterators]
    described = _description(files)
    try:
        names = _shards.choose(iterators, files, path)
    except errors.DatasetStateError as error:
        if not restarting:
            raise
        _log.warning("the data starts from the beginning: %s", error)
        return
    _warn_of_version(_innermost(iterators[0]), described, path)
    saved_by = errors.printable(str(described.get("type", "by Orbax")))
    for iterator in iterators:
        _diagnostics.warn_of_traps(_innermost(iterator))
    decoded: list[Any] = []
    at = iterators[0]
    try:
        if names is None:
            _set_shards(iterators[0], files, described)
            return
        for at, adapter, name in zip(iterators, adapters, names, strict=True):
            decoded.append(_decoded(at, adapter, files[name], described))
        for at, adapter, state in zip(iterators, adapters, decoded, strict=True):
            adapter.set_state(at, state)
    except errors.DatasetStateError:
        raise
    except Exception as error:
        raise _diagnostics.not_taken(
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
        raise _diagnostics.no_state(_innermost(iterator), error) from error


def _content(iterator: Any, state: Any, *, as_bytes: bool = False) -> bytes:
    try:
        if as_bytes and _json_codec.is_own_json(state):
            content: bytes = state
        else:
            content = _json_codec.dumps(state)
        _json_codec.check_size(content)
    except Exception as error:
        raise _diagnostics.no_state(_innermost(iterator), error) from error
    _diagnostics.warn_of_size(_innermost(iterator), len(content))
    return content


def _decoded(
    iterator: Any,
    adapter: _adapters.Adapter,
    content: bytes,
    described: Mapping[str, Any],
) -> Any:
    # Without our description, the type of the iterator's own state decides.
    as_bytes = described.get("is_bytes")
    if as_bytes is None:
        as_bytes = isinstance(adapter.get_state(iterator), bytes)
    is_raw = described.get("is_raw", as_bytes and _json_codec.is_own_json(content))
    state = (
        content
        if is_raw
        else _json_codec.loads(content, version=_version_of(described))
    )
    if as_bytes and not isinstance(state, bytes):
        raise TypeError(f"wanted bytes, found {type(state).__name__}")
    return state


def _version_of(described: Mapping[str, Any]) -> int:
    """Returns the codec version: 1 for the first releases, 0 for Orbax."""
    return int(described.get("codec", 1 if described else 0))


def _description(files: Mapping[str, bytes]) -> dict[str, Any]:
    content = files.get(DESCRIPTION, b"{}")
    try:
        _json_codec.check_size(content)
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _warn_of_version(iterator: Any, described: Mapping[str, Any], path: Path) -> None:
    now, then = _duck_types.version(iterator), described.get("version")
    same = str(described.get("type")).startswith(f"{_duck_types.package(iterator)}.")
    if same and now and then and now != then:
        _log.warning(
            "the dataset's state in %s is of %s %s, and this is %s, which may read it"
            " otherwise: compare the first batches",
            path,
            _duck_types.package(iterator),
            errors.printable(str(then)),
            now,
        )


# ---- shards ---------------------------------------------------------------------


def _shard_files(iterator: Any) -> dict[str, bytes]:
    try:
        states = list(iterator.get_shard_states())
    except Exception as error:
        raise _diagnostics.no_state(iterator, error) from error
    return {
        _shards.shard_name(i): _content(iterator, state)
        for i, state in enumerate(states)
    }


def _set_shards(
    iterator: Any, files: Mapping[str, bytes], described: Mapping[str, Any]
) -> None:
    names = _shards.own_shards(iterator, files)
    version = _version_of(described)
    iterator.set_shard_states(
        [_json_codec.loads(files[n], version=version) for n in names]
    )
