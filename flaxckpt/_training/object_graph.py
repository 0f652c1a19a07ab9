"""Finds the values of NNX objects, to read and replace them quickly."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxckpt import _state


class _Slot(NamedTuple):
    """The place of an array outside of variables: a container, and the key in it."""

    container: Any
    key: Any

    @property
    def is_item(self) -> bool:
        """True if the key is an index or a dictionary key."""
        return isinstance(self.container, Mapping | Sequence)

    def get(self) -> Any:
        if self.is_item:
            return self.container[self.key]
        return getattr(self.container, self.key)

    def set(self, value: Any) -> None:
        if self.is_item:
            self.container[self.key] = value
        else:
            setattr(self.container, self.key, value)


class ObjectGraph:
    """The places of all values in NNX objects, found once for quick access."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = tuple(objects)
        nodes = self._nodes()
        self._variables, self._slots = self._find(nodes)
        containers = [node for node in nodes.values() if _is_changeable(node)]
        self._contents = [_Contents(node) for node in containers]

    def _nodes(self) -> dict[tuple[Any, ...], Any]:
        nodes = dict(_state.nnx_objects.loaded_nnx().iter_graph(self._objects))
        nodes[()] = self._objects
        return nodes

    @staticmethod
    def _find(nodes: Mapping[tuple[Any, ...], Any]) -> tuple[list[Any], list[_Slot]]:
        """Returns the variables, and the places of arrays outside of variables."""
        nnx = _state.nnx_objects.loaded_nnx()
        variables = [node for node in nodes.values() if isinstance(node, nnx.Variable)]
        slots = [
            _Slot(nodes[path[:-1]], path[-1])
            for path, node in nodes.items()
            if isinstance(node, jax.Array | np.ndarray)
        ]
        return variables, slots

    def is_of(self, objects: Sequence[Any]) -> bool:
        return _are_identical(objects, self._objects)

    def is_current(self) -> bool:
        """Returns True if all values of the objects are still at the same places."""
        variables, slots = self._find(self._nodes())
        return (
            _are_identical(variables, self._variables)
            and _are_identical(
                [s.container for s in slots], [s.container for s in self._slots]
            )
            and [s.key for s in slots] == [s.key for s in self._slots]
        )

    def has_same_contents(self) -> bool:
        """Returns True if every object holds the same objects and variables.

        Faster than `is_current`. If False, places may be unchanged all the same.
        """
        return not any(contents.have_changed() for contents in self._contents)

    def values(self) -> list[Any]:
        values = [_raw_value(variable) for variable in self._variables]
        return values + [slot.get() for slot in self._slots]

    def set_values(self, values: Sequence[Any]) -> None:
        variables = values[: len(self._variables)]
        for variable, value in zip(self._variables, variables, strict=True):
            _set_raw_value(variable, value)
        slots = values[len(self._variables) :]
        for slot, value in zip(self._slots, slots, strict=True):
            if slot.get() is not value:
                slot.set(value)


def _are_identical(these: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(these) == len(others) and all(map(operator.is_, these, others))


class _Contents:
    """The contents of a container; plain values and arrays stand for their kind."""

    def __init__(self, node: Any) -> None:
        self._items: Any = node if isinstance(node, dict | list) else vars(node)
        self._keys, values = self._now()
        # Arrays are not kept, because a training step may need their memory.
        self._values = [_array_marked(value) for value in values]

    def _now(self) -> tuple[list[Any], list[Any]]:
        if isinstance(self._items, list):
            return [], self._items
        return list(self._items), list(self._items.values())

    def have_changed(self) -> bool:
        keys, values = self._now()
        if keys != self._keys or len(values) != len(self._values):
            return True
        return not _are_identical(values, self._values) and any(
            value is not before and _marked(value) is not _marked(before)
            for value, before in zip(values, self._values, strict=True)
        )


def _is_changeable(node: object) -> bool:
    """Returns True for a node, other than a variable, that can change its contents."""
    return _state.nnx_objects.is_object(node) or isinstance(node, dict | list)


def _raw_value(variable: Any) -> Any:
    """Returns a variable's raw value, bypassing the hooks of `Variable.value`."""
    if hasattr(type(variable), "get_raw_value"):
        return variable.get_raw_value()
    return variable.raw_value  # Flax 0.12.1


def _set_raw_value(variable: Any, value: Any) -> None:
    if hasattr(type(variable), "set_raw_value"):
        variable.set_raw_value(value)
    else:
        variable.raw_value = value


_STATIC = frozenset({type(None), bool, int, float, complex, str, bytes})


def _array_marked(value: Any) -> Any:
    """Returns `value`, or `np.ndarray` for any array."""
    return np.ndarray if isinstance(value, jax.Array | np.ndarray) else value


def _marked(value: Any) -> Any:
    """Returns `value`, or a marker type for any array or plain value."""
    return object if type(value) in _STATIC else _array_marked(value)
