"""Adapters that get and set the state of each kind of iterator."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from flaxckpt import errors
from flaxckpt.datasets import _diagnostics, _duck_types

_log = logging.getLogger(__name__)

_TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader"
_TORCHDATA_ITERATOR = (
    "torchdata.stateful_dataloader.stateful_dataloader._StatefulBaseDataLoaderIter"
)
_CLU = "clu.data.dataset_iterator.DatasetIterator"
_CLU_PEEKABLE = "clu.data.dataset_iterator.PeekableDatasetIterator"
_HF_PREPARE = "_prepare_ex_iterable_for_iteration"  # the first call of iter()
_TENSORFLOW = (
    "tensorflow.python.data.ops.iterator_ops.OwnedIterator",
    "tensorflow.python.data.ops.dataset_ops.NumpyIterator",
    "tensorflow.python.data.ops.dataset_ops._NumpyIterator",
)


class Adapter(Protocol):
    """Gets and sets the state of a kind of iterator."""

    name: str

    def get_state(self, iterator: Any) -> Any:
        """Returns the state after the last returned batch: data, or JSON as bytes."""
        ...

    def set_state(self, iterator: Any, state: Any) -> None: ...


def find(iterator: Any) -> Adapter:
    """Returns the adapter for an iterator.

    Raises DatasetStateError for one without a state; the message suggests others.
    """
    # grain also has async save and load; TensorFlow and clu differ in `save`.
    if _duck_types.has(iterator, "get_state", "set_state"):
        return _GetState()
    if _duck_types.is_a(
        iterator, _TORCHDATA_ITERATOR
    ):  # only some of them accept a state
        raise _diagnostics.no_state_error(iterator)
    if _duck_types.has(iterator, "state_dict", "load_state_dict"):
        return _StateDict()
    if _duck_types.is_a(iterator, *_TENSORFLOW):
        return _TensorFlow()
    if _duck_types.is_a(iterator, _CLU):
        return _Clu()
    raise _diagnostics.no_state_error(iterator)


def position(iterator: Any) -> int | None:
    """Returns the position of an iterator with a counter in the state, or None.

    Counters exist in grain's datasets and in `StepIndexed`. They count batches if the
    counting stage of the pipeline produces batches. Before a filter, they count the
    elements that it drops, too: a batch takes no fixed number.
    """
    if not _duck_types.has(iterator, "get_state", "set_state") or _filters(iterator):
        return None
    try:
        state = iterator.get_state()
    except Exception:  # reported when the state is saved
        return None
    index = state.get("next_index") if isinstance(state, Mapping) else None
    return index if type(index) is int else None


def _filters(stage: Any) -> bool:
    """Returns True if a stage of a pipeline of grain is a filter."""
    if _duck_types.package(stage) != "grain":
        return False
    if "Filter" in type(stage).__name__:
        return True
    before = [*getattr(stage, "_parents", ()), getattr(stage, "_map_parent", None)]
    return any(map(_filters, before))


class _GetState:
    """Gets and sets the state of grain, AXLearn and flaxckpt iterators."""

    name = "get_state"

    def get_state(self, iterator: Any) -> Any:
        return iterator.get_state()

    def set_state(self, iterator: Any, state: Any) -> None:
        iterator.set_state(state)


class _StateDict:
    """Gets and sets the state of torchdata and Hugging Face loaders and datasets."""

    name = "state_dict"

    def get_state(self, iterator: Any) -> Any:
        return iterator.state_dict()

    def set_state(self, iterator: Any, state: Any) -> None:
        if _duck_types.is_a(iterator, _TORCHDATA):
            _check_workers(iterator, state)
            _warn_of_live_iterator(iterator)
        dataset = getattr(iterator, "dataset", iterator)
        if not _duck_types.is_a(dataset, _diagnostics.HF):
            _load(iterator, state)
            return
        if dataset is iterator and _is_started(dataset):
            _warn_of_started_loop(iterator)
        before = dataset.epoch
        try:
            # The state contains an epoch, and is ignored in any other epoch.
            for epoch in _epochs(state):
                dataset.set_epoch(epoch)
            _load(iterator, state)
        except Exception:
            dataset.set_epoch(before)
            raise


def _epochs(state: Any) -> Iterator[int]:
    """Yields the epochs in Hugging Face dataset states, also within torch states."""
    if isinstance(state, Mapping):
        if "examples_iterable" in state and "epoch" in state:
            yield int(state["epoch"])
            return
        for item in state.values():
            yield from _epochs(item)


def _load(iterator: Any, state: Any) -> None:
    """Makes a loader use the new state now, not at the next call of iter().

    An invalid state then raises here, and a save before the first batch contains the
    restored state.
    """
    iterator.load_state_dict(state)
    try:
        if _duck_types.is_a(iterator, _TORCHDATA):
            iterator.state_dict()
        elif _duck_types.is_a(iterator, _diagnostics.HF) and _duck_types.has(
            iterator, _HF_PREPARE
        ):
            getattr(iterator, _HF_PREPARE)()
    except Exception:
        if _duck_types.is_a(iterator, _TORCHDATA):
            iterator.next_iter_state = None
        else:
            iterator.load_state_dict(None)
        raise


def _check_workers(loader: Any, state: Mapping[str, Any]) -> None:
    saved = state.get("_snapshot", {}).get("_main_snapshot", {}).get("_num_workers", 0)
    if saved != loader.num_workers:
        raise ValueError(
            f"saved with {saved} workers, but this loader has {loader.num_workers}"
        )


def _warn_of_live_iterator(iterator: Any) -> None:
    live = getattr(iterator, "_iterator", None)
    if (
        live is not None
        and not getattr(iterator, "_initial_iter_for_state_dict", False)
        and not getattr(live, "_finished", False)
    ):
        _warn_of_started_loop(iterator)


def _is_started(dataset: Any) -> bool:
    """Returns True if a Hugging Face dataset moved after `load_state_dict`.

    A loop that has already ended cannot be detected.
    """
    if not _duck_types.has(dataset, _HF_PREPARE):
        return False
    now = repr(dataset.state_dict())
    getattr(dataset, _HF_PREPARE)()
    return now != repr(dataset.state_dict())


def _warn_of_started_loop(iterator: Any) -> None:
    _log.warning(
        "a loop over this %s has started and does not use the restored state:"
        " call iter() on it again, or restore before the first iter()",
        _duck_types.type_name(iterator),
    )


class _TensorFlow:
    """Gets and sets the state of tf.data iterators by a `tf.train.Checkpoint`."""

    name = "tf.train.Checkpoint"

    def get_state(self, iterator: Any) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            _tf_checkpoint(iterator).write(f"{directory}/iterator")
            return _files_in(directory)

    def set_state(self, iterator: Any, state: Any) -> None:
        with tempfile.TemporaryDirectory() as directory:
            _put_files(directory, state)
            _tf_checkpoint(iterator).read(f"{directory}/iterator").assert_consumed()


def _tf_checkpoint(iterator: Any) -> Any:
    # An iterator of TensorFlow exists, so TensorFlow is imported.
    return sys.modules["tensorflow"].train.Checkpoint(iterator=iterator)


class _Clu:
    """Gets and sets the state of clu iterators, as files in clu's format."""

    name = "files"

    def get_state(self, iterator: Any) -> Any:
        name = _duck_types.type_name(iterator)
        if _has_peeked(iterator):
            raise errors.DatasetStateError(
                f"{name} has a batch that was peeked at but not taken, which would be"
                " lost: call next() before saving"
            )
        with tempfile.TemporaryDirectory() as directory:
            try:
                iterator.save(_epath(directory))
            except NotImplementedError:
                raise errors.DatasetStateError(
                    f"{name} does not save its state: implement the methods save and"
                    " restore of a DatasetIterator, or pass dataset=None"
                ) from None
            files = _files_in(directory)
        if not files:
            raise errors.DatasetStateError(
                f"{name} saved nothing; create a TfDatasetIterator with checkpoint=True"
            )
        return files

    def set_state(self, iterator: Any, state: Any) -> None:
        if _has_peeked(iterator):
            iterator.reset()  # restore() alone would return the old batch first
        with tempfile.TemporaryDirectory() as directory:
            _put_files(directory, state)
            iterator.restore(_epath(directory))


def _has_peeked(iterator: Any) -> bool:
    if not _duck_types.is_a(iterator, _CLU_PEEKABLE):
        return False
    future = getattr(iterator, "_peek_future", None)
    if future is not None:
        future.result()  # of peek_async, which may still be running
    return getattr(iterator, "_peek", None) is not None


def _epath(directory: str) -> Any:
    from etils import epath

    return epath.Path(directory) / "iterator"


def _files_in(directory: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(Path(directory).iterdir())}


def _put_files(directory: str, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (Path(directory) / Path(name).name).write_bytes(content)
