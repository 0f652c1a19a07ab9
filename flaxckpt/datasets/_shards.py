"""Assigns state files to iterators: parts of the data, spread over processes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import _util, errors
from flaxckpt.datasets import _duck_types, _json_codec, _names

_SHARD = re.compile(r"shard_state_(\d+)\.json")


def choose(
    iterators: Sequence[Any], files: Mapping[str, bytes], path: Path, is_whole: bool
) -> list[str] | None:
    """Returns the state file of each iterator; None if shards have state files.

    Raises DatasetStateError if no file fits, as the number of processes has changed, or
    a process saved no state. Unless `is_whole`, such a state may have been lost: it
    raises DamagedCheckpointError.
    """
    names = _names.state_names(len(iterators))
    if all(name in files for name in names):
        return names
    saved = sorted(name for name in files if _names.STATE.fullmatch(name))
    count = (
        int(match[2]) if saved and (match := _names.STATE.fullmatch(saved[0])) else 0
    )
    if not saved and _names.SHARED in files:
        saved, count = [_names.SHARED], 1
        if len(iterators) == _util.processes.process_count() == 1:
            return saved
    elif (
        count == _util.processes.process_count() * len(iterators) or len(saved) != count
    ):
        missing = (
            f"{path} has the dataset states {saved[: errors.ROWS_SHOWN]}, but not all"
            f" {count}"
        )
        if not is_whole:
            raise errors.DamagedCheckpointError(f"{missing}; restore another step")
        raise errors.DatasetStateError(
            f"{missing}: the other processes passed no dataset to the save, so their"
            " data cannot continue; pass dataset=None there, or"
            " datasets.Restarting(iterator), or restore another step"
        )
    if has_shards(iterators) and any(_SHARD.fullmatch(name) for name in files):
        return None
    equal = len({files[name] for name in saved}) == 1
    if equal and all(_is_elastic(it, files[saved[0]]) for it in iterators):
        return [saved[0]] * len(iterators)
    raise _process_count_error(path, count, len(iterators))


def _is_elastic(iterator: Any, content: bytes) -> bool:
    """Returns True if any process can continue with the common state."""
    if getattr(iterator, "elastic", False):
        return True
    try:
        state = _json_codec.loads(content, version=0)
    except (ValueError, RecursionError):
        return False
    # grain's ElasticIterator, with any later stages.
    return isinstance(state, dict) and state.keys() == {"global_next_index"}


def _process_count_error(
    path: Path, count: int, iterators: int
) -> errors.DatasetStateError:
    processes = _util.processes.process_count()
    ways = []
    if count % iterators == 0:
        ways.append(f"restart with {count // iterators} processes")
    if count % processes == 0:
        ways.append(
            f"pass a list of {count // processes} iterators: on process K, over parts"
            f" K, K + {processes}, … of the {count} parts of the data"
        )
    ways += [
        "use an elastic iterator: grain's ElasticIterator, or StepIndexed with"
        " global batches",
        "start the data from the beginning: datasets.Restarting(iterator), or"
        " dataset=None",
    ]
    now = f"{processes} processes" if processes > 1 else "one process"
    each = f" with {iterators} iterators each" if iterators > 1 else ""
    return errors.DatasetStateError(
        f"{path} has the dataset states of"
        f" {_util.humanize.count(count, 'process', 'processes')}, but this run has"
        f" {now}{each}: a state belongs to its part of the data.\nEither\n"
        + errors.rows(ways)
    )


# ---- shards ---------------------------------------------------------------------


def has_shards(iterators: Sequence[Any]) -> bool:
    """Returns True if the iterator can get and set the state of each shard."""
    return len(iterators) == 1 and _duck_types.has_shards(iterators[0])


def shard_name(i: int) -> str:
    """Returns the file of the `i`th shard of this process, numbered over all."""
    index = _util.processes.process_index() + i * _util.processes.process_count()
    return f"shard_state_{index}.json"


def shard_names(iterator: Any, files: Mapping[str, bytes]) -> list[str]:
    """Returns the files of the shards of this process.

    Raises DatasetStateError if its iterator has another number of shards.
    """
    count = sum(_SHARD.fullmatch(name) is not None for name in files)
    index, step = _util.processes.process_index(), _util.processes.process_count()
    wanted = len(list(iterator.get_shard_states()))
    names = [f"shard_state_{i}.json" for i in range(index, count, step)]
    if len(names) != wanted or not all(name in files for name in names):
        raise errors.DatasetStateError(
            f"{count} shards of the data were saved. Process {index} of {step} takes"
            f" {len(names)} of them, but its iterator has {wanted}.\nGive it the shards"
            f" {index}, {index + step}, … of the same data."
        )
    return names
