"""Errors and warnings about iterators without state, or with incomplete state."""

from __future__ import annotations

import collections
import contextlib
import logging
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from flaxckpt import errors
from flaxckpt.datasets import _duck_types

_log = logging.getLogger(__name__)

LARGE_STATE_BYTES = 16 * 2**20

HF = "datasets.iterable_dataset.IterableDataset"
_HF_BUFFER = "datasets.iterable_dataset.BufferShuffledExamplesIterable"

_TORCH_SAMPLER = "torch.utils.data.sampler.RandomSampler"

_WAYS_OUT = (
    "Use a grain iterator, or flaxckpt.datasets.StepIndexed(fn) where batch i is"
    " fn(i), or give your class get_state and set_state."
)

_BY_CLASS = {
    "datasets.arrow_dataset.Dataset": "Pass x.to_iterable_dataset() instead of the"
    " Dataset x, and iterate over that.",
    "datasets.dataset_dict.DatasetDict": "Pass one of its splits, as"
    " x['train'].to_iterable_dataset().",
    "torch.utils.data.dataloader.DataLoader": "Use torchdata's StatefulDataLoader,"
    " which takes the same arguments, and pass the loader itself.",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "Use torchdata's"
    " StatefulDataLoader, and pass the loader itself: iter(loader) has no state.",
    "tensorflow.python.data.ops.dataset_ops.DatasetV2": "Create one iterator,"
    " x.as_numpy_iterator() or iter(x), train with it, and pass it.",
    "seqio.dataset_providers.DatasetProviderBase": "Pass the iterator that you train"
    " with, x.get_dataset(…).as_numpy_iterator().",
}
_GENERATORS = {
    "datasets.iterable_dataset": "Pass the dataset itself, which keeps the state, and"
    " call iter() on it after the restore.",
    "flax.jax_utils": "Its position is ahead of the training. Use"
    " flaxckpt.datasets.Buffered(iterator, transform=jax.device_put) instead.",
}


def no_state_error(obj: Any) -> errors.DatasetStateError:
    return errors.DatasetStateError(
        f"{_duck_types.type_name(obj)} cannot be saved: wanted an iterator with"
        f" get_state and set_state, found neither.\n{_way_out(obj)}\nOr pass"
        " dataset=None; the data then starts from the beginning after a restart."
    )


def _way_out(obj: Any) -> str:
    if isinstance(obj, type):
        return "It is a class: pass an object of it."
    if isinstance(obj, types.GeneratorType):
        frame = obj.gi_frame
        made_by = frame.f_globals.get("__name__") if frame else None
        return _GENERATORS.get(str(made_by), _WAYS_OUT)
    if _duck_types.package(obj) == "grain":
        return f"Pass iter(x) instead of the {type(obj).__name__} x."
    if _duck_types.package(obj) == "torchdata":
        return "Pass the loader itself, and call iter() on it after the restore."
    for cls in type(obj).__mro__:
        if hint := _BY_CLASS.get(_duck_types.full_name(cls)):
            return hint
    return _WAYS_OUT


def get_state_error(
    obj: Any,
    error: Exception,
    advice: str = "Check that it is not closed, or pass dataset=None.",
) -> errors.DatasetStateError:
    """Returns the error for an iterator after a failure of `get_state`."""
    if _duck_types.package(obj) == "tensorflow":
        advice = (
            "TensorFlow cannot save Python functions inside a pipeline (from_generator,"
            " py_function): use TensorFlow operations only, or pass dataset=None."
        )
    if isinstance(error, RecursionError):
        advice = "It is nested too deep, or contains itself."
    return errors.DatasetStateError(
        f"{_duck_types.type_name(obj)} has no state that can be saved:"
        f" {type(error).__name__}: {first_line(error)}\n{advice}"
    )


def set_state_error(
    obj: Any, error: Exception, *, saved_by: str, path: object
) -> errors.DatasetStateError:
    """Returns the error for an iterator after a failure of `set_state`."""
    advice = "Pass an iterator over the same data, built the same way, or dataset=None."
    if "worker" in str(error).lower():
        advice = "Use as many workers as at the save, or pass dataset=None."
    return errors.DatasetStateError(
        f"{_duck_types.type_name(obj)} does not accept the state saved in {path}"
        f" ({saved_by}): {type(error).__name__}: {first_line(error)}\n{advice}"
    )


def first_line(error: Exception) -> str:
    """Returns the message of another library's error, shortened to a line."""
    return errors.printable(errors.one_line(error))


# ---- warnings -------------------------------------------------------------------

_EQUAL_STATES = 3
"""Number of steps with equal states at which a warning is due."""


class Standstill:
    """Warns, once, of a dataset whose state does not move from step to step."""

    def __init__(self) -> None:
        self._state: dict[str, int] = {}
        self._steps: list[int] = []
        self._has_warned = False

    def note(self, step: int, files: Mapping[str, bytes]) -> None:
        """Compares the state at a step, as files, with those of earlier steps."""
        state = {name: hash(content) for name, content in files.items()}
        if state != self._state:
            self._state, self._steps = state, []
        if not state or step in self._steps or self._has_warned:
            return
        self._steps.append(step)
        if len(self._steps) == _EQUAL_STATES:
            self._has_warned = True
            _log.warning(
                "the state of the dataset is the same at the steps %s: a resume from"
                " any of them takes the same batches. Pass the iterator from which the"
                " loop takes its batches, whose get_state returns the position, or, if"
                " the loop takes none, dataset=None",
                ", ".join(map(str, self._steps)),
            )


_warned: collections.defaultdict[str, weakref.WeakSet[Any]] = collections.defaultdict(
    weakref.WeakSet
)


def warn_of_traps(obj: Any) -> None:
    """Warns, once per iterator, of a state without the full position."""
    if any(_is_buffer(part) for part in _parts(obj)):
        _warn_once(
            obj,
            "the shuffle buffer of %s is not part of its state: after a restore, the"
            " examples in the buffer are lost. Shuffle before to_iterable_dataset(),"
            " or with buffer_size=1.",
        )
    if _duck_types.package(obj) == "torchdata" and _has_hidden_order(obj):
        _warn_once(
            obj,
            "the state of %s does not include its whole shuffle order: after a restore,"
            " later epochs may have another order. Use shuffle=True and without"
            " generator=, or torchdata's RandomSampler.",
        )


def _is_buffer(part: Any) -> bool:
    """Returns True for a shuffle buffer of more than a single example."""
    return _duck_types.is_a(part, _HF_BUFFER) and getattr(part, "buffer_size", 0) != 1


def _has_hidden_order(loader: Any) -> bool:
    """Returns True for a sampler without state, or with the loader's generator."""
    sampler = getattr(loader, "sampler", None)
    generator = getattr(sampler, "generator", None)
    return _duck_types.is_a(sampler, _TORCH_SAMPLER) or (
        generator is not None and generator is getattr(loader, "generator", None)
    )


def warn_of_size(obj: Any, size: int) -> None:
    """Warns, once per iterator, of a large state."""
    if size > LARGE_STATE_BYTES:
        _warn_once(
            obj,
            "the state of %s takes %d bytes in every checkpoint: a smaller shuffle"
            " buffer reduces it",
            size,
        )


def _warn_once(obj: Any, message: str, *values: object) -> None:
    with contextlib.suppress(TypeError):  # without weak references, warn every time
        if obj in _warned[message]:
            return
        _warned[message].add(obj)
    _log.warning(message, _duck_types.type_name(obj), *values)


def _parts(obj: Any) -> Iterator[Any]:
    """Yields the stages of a Hugging Face pipeline, including inside torch loaders."""
    waiting = [getattr(obj, "dataset", obj)]
    while waiting:
        part = waiting.pop()
        if _duck_types.package(part) != "datasets":
            continue
        yield part
        waiting.extend(
            getattr(part, name)
            for name in ("_ex_iterable", "ex_iterable")
            if hasattr(part, name)
        )
        waiting.extend(getattr(part, "ex_iterables", ()))
