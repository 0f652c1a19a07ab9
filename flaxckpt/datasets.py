"""Dataset iterators: their state out, their state back in.

An iterator is recognised by its methods, never by importing its framework. Its state
is taken at the call of `save` and committed together with the arrays.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from flaxckpt import _dtypes, _multihost, errors

__all__ = ["SaveableIterator", "StepIndexed"]

Batch = TypeVar("Batch")

DESCRIPTION = "metadata"
"""Our description of the saved iterator: the file that Orbax's JSON reader expects."""

MAX_STATE_BYTES = 256 * 2**20


@runtime_checkable
class SaveableIterator(Protocol):
    """What an iterator needs to be saved and restored: grain's protocol.

    The state may nest dicts, lists and tuples of numbers, strings, bytes and numpy
    arrays.
    """

    def get_state(self) -> Any:
        """The position, as of the batch that was returned last."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Goes to a position that `get_state` gave."""
        ...


class StepIndexed(Generic[Batch]):
    """Batches that are a function of their index, so that the index is all the state.

    ```python
    batches = StepIndexed(lambda i: make_batch(seed=0, index=i))
    ```

    Args:
        fn: Makes batch `i`, always the same for the same `i`.
        start: Index of the first batch.
    """

    elastic = True

    def __init__(self, fn: Callable[[int], Batch], *, start: int = 0) -> None:
        self._fn = fn
        self._next = start

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._fn(self._next)
        self._next += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """The index of the batch that comes next."""
        return {"next_index": self._next}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continues with batch `state["next_index"]`."""
        self._next = int(state["next_index"])


def state_files(iterator: Any) -> dict[str, bytes]:
    """Takes the state of `iterator` as it is now.

    Returns:
        File name -> content: this process's state, as grain and Orbax write it, and
        a description of it.

    Raises:
        DatasetStateError: The iterator gives no state, or one that cannot be written.
    """
    adapter = _adapter(iterator)
    state = adapter.get_state(iterator)
    if isinstance(state, bytes) and _is_json(state):
        content = state
    else:
        content = json.dumps(_encode(state, type(iterator)), indent=4).encode()
    if len(content) > MAX_STATE_BYTES:
        raise errors.DatasetStateError(
            f"the state of {_type_name(iterator)} takes {len(content)} bytes, more than"
            f" {MAX_STATE_BYTES}; save an iterator without a large shuffle buffer"
        )
    count = _multihost.process_count()
    description = {
        "adapter": adapter.name,
        "type": _type_name(iterator),
        "is_bytes": isinstance(state, bytes),
        "is_raw": isinstance(state, bytes) and _is_json(state),
        "process_count": count,
        "elastic": bool(getattr(iterator, "elastic", False)),
        "version": _version(iterator),
    }
    return {
        _file_name(_multihost.process_index(), count): content,
        DESCRIPTION: json.dumps(description).encode(),
    }


def set_state(iterator: Any, files: Mapping[str, bytes], *, path: Path) -> None:
    """Puts `iterator` where the saved one stood.

    Args:
        iterator: Of the same kind, over the same data.
        files: What `state_files` returned, or what Orbax and grain wrote.
        path: The checkpoint, for messages.

    Raises:
        DatasetStateError: The iterator refuses the state, or another number of
            processes saved it.
    """
    adapter = _adapter(iterator)
    described = _description(files)
    content = files[_own_file(iterator, files, described, path)]
    try:
        # Without our description, the iterator's own state tells what it expects.
        as_bytes = described.get("is_bytes", None)
        if as_bytes is None:
            as_bytes = isinstance(adapter.get_state(iterator), bytes)
        is_raw = described.get("is_raw", as_bytes)
        state = content if is_raw else _decode(content)
        if as_bytes and not isinstance(state, bytes):
            raise TypeError(f"wanted bytes, found {type(state).__name__}")
        adapter.set_state(iterator, state)
    except Exception as error:
        raise errors.DatasetStateError(
            f"{_type_name(iterator)} does not take the state saved in {path}"
            f" ({described.get('type', 'by Orbax')}): {str(error)[:300]}\n"
            "Pass an iterator over the same data, built the same way, or dataset=None."
        ) from error


# ---- kinds of iterators ---------------------------------------------------------


class _Adapter(Protocol):
    name: str

    def get_state(self, iterator: Any) -> Any: ...
    def set_state(self, iterator: Any, state: Any) -> None: ...


class _GetState:
    """grain, AXLearn, our own."""

    name = "get_state"

    def get_state(self, iterator: Any) -> Any:
        return iterator.get_state()

    def set_state(self, iterator: Any, state: Any) -> None:
        iterator.set_state(state)


class _StateDict:
    """torchdata, Hugging Face datasets."""

    name = "state_dict"

    def get_state(self, iterator: Any) -> Any:
        return iterator.state_dict()

    def set_state(self, iterator: Any, state: Any) -> None:
        iterator.load_state_dict(state)


class _Files:
    """clu, whose iterators write files that only they can read."""

    name = "files"

    def get_state(self, iterator: Any) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            iterator.save(self._path(directory))
            return {p.name: p.read_bytes() for p in sorted(Path(directory).iterdir())}

    def set_state(self, iterator: Any, state: Any) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for name, content in state.items():
                (Path(directory) / Path(name).name).write_bytes(content)
            iterator.restore(self._path(directory))

    def _path(self, directory: str) -> Any:
        from etils import epath

        return epath.Path(directory) / "iterator"


def _adapter(iterator: Any) -> _Adapter:
    if _has(iterator, "get_state", "set_state"):
        return _GetState()
    if _has(iterator, "state_dict", "load_state_dict"):
        return _StateDict()
    if any(
        f"{cls.__module__}.{cls.__name__}"
        == "clu.data.dataset_iterator.DatasetIterator"
        for cls in type(iterator).__mro__
    ):
        return _Files()
    raise errors.DatasetStateError(
        f"{_type_name(iterator)} cannot be saved: wanted an iterator with get_state and"
        f" set_state, found neither.\n{_hint(iterator)}\nOr pass dataset=None, and the"
        " data starts from the beginning after a restart."
    )


def _has(iterator: Any, *names: str) -> bool:
    return not isinstance(iterator, type) and all(
        callable(getattr(iterator, name, None)) for name in names
    )


def _hint(iterator: Any) -> str:
    if type(iterator).__module__.split(".")[0] == "grain":
        return f"Pass iter(x) instead of the {type(iterator).__name__} x."
    return (
        "Use a grain iterator, or flaxckpt.datasets.StepIndexed(fn) where batch i is"
        " fn(i), or give your class those two methods."
    )


def _type_name(iterator: Any) -> str:
    return f"{type(iterator).__module__}.{type(iterator).__qualname__}"


def _version(iterator: Any) -> str | None:
    try:
        return importlib.metadata.version(type(iterator).__module__.split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- files ----------------------------------------------------------------------


def _file_name(index: int, count: int) -> str:
    return f"process_{index}-of-{count}.json"


def _description(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        found = json.loads(files.get(DESCRIPTION, b"{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _own_file(
    iterator: Any, files: Mapping[str, bytes], described: Mapping[str, Any], path: Path
) -> str:
    own = _file_name(_multihost.process_index(), _multihost.process_count())
    if own in files:
        return own
    states = {name: files[name] for name in files if name.startswith("process_")}
    is_elastic = described.get("elastic") or getattr(iterator, "elastic", False)
    if states and is_elastic and len(set(states.values())) == 1:
        return next(iter(states))
    raise errors.DatasetStateError(
        f"{path} has dataset states {sorted(states) or 'of no process'}, wanted {own}:"
        " this iterator's state belongs to a fixed number of processes.\nRestart with"
        " as many processes as saved it, use an elastic iterator (StepIndexed with"
        " global batches), or pass dataset=None."
    )


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def _encode(state: Any, owner: type) -> Any:
    """`state` as JSON; what JSON lacks becomes an object with one tag."""
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, bytes):
        return {"__bytes__": base64.b64encode(state).decode()}
    if isinstance(state, np.generic):
        return _encode(state.item(), owner)
    if isinstance(state, np.ndarray) and _dtypes.stored_name(state.dtype.name):
        return {
            "__ndarray__": {
                "dtype": state.dtype.name,
                "shape": state.shape,
                "data": base64.b64encode(
                    np.ascontiguousarray(state).tobytes()
                ).decode(),
            }
        }
    if isinstance(state, tuple):
        return {"__tuple__": [_encode(item, owner) for item in state]}
    if isinstance(state, list):
        return [_encode(item, owner) for item in state]
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        return {key: _encode(item, owner) for key, item in state.items()}
    raise errors.DatasetStateError(
        f"the state of {owner.__module__}.{owner.__qualname__} holds a"
        f" {type(state).__module__}.{type(state).__qualname__}: wanted dicts with str"
        " keys, lists, numbers, strings, bytes or numpy arrays.\nConvert it in"
        " get_state and back in set_state."
    )


def _decode(content: bytes) -> Any:
    return json.loads(content, object_hook=_untag)


def _untag(found: dict[str, Any]) -> Any:
    match found:
        case {"__bytes__": str(text), **rest} if not rest:
            return base64.b64decode(text)
        case {"__tuple__": list(items), **rest} if not rest:
            return tuple(items)
        case {"__ndarray__": dict(array), **rest} if not rest:
            data = base64.b64decode(array["data"])
            dtype = _dtypes.to_numpy(array["dtype"])
            return np.frombuffer(data, dtype).reshape(array["shape"]).copy()
    return found
