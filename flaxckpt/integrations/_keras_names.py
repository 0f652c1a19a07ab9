"""Names of Keras variables that do not depend on what else the process has built.

Keras numbers objects without a name in the order in which the process creates them.
Here they are numbered among those of the model, in the same order: `seed_generator_7`
and `seed_generator_9` are `seed_generator` and `seed_generator_1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flaxckpt import _state
from flaxckpt._types import PyTree

_NUMBERED = re.compile(r"(.+?)(?:_(\d+))?")


class StableNames:
    """The names of a compiled model's variables, by Keras and here.

    The model must have all of its variables.
    """

    def __init__(self, model: Any) -> None:
        named = [*_optimizers(model.optimizer), *_layers(model), *model.metrics]
        self._bases = {"seed_generator", *(_snake_case(type(each)) for each in named)}
        for layer in named:
            if hasattr(layer, "backward_layer"):  # a keras.layers.Bidirectional
                base = _snake_case(type(layer.forward_layer))
                self._bases |= {f"forward_{base}", f"backward_{base}"}
        tree = model.get_state_tree()
        paths = [path for path, _ in _flatten(tree)]
        numbers: dict[str, set[int]] = {}
        for part in {part for path in paths for part in path}:
            base, number = _split(part)
            numbers.setdefault(base, set()).add(number)
        self._ranks = {base: sorted(found) for base, found in numbers.items()}
        weights = [p[1:] for p in paths if p[0] == "trainable_variables"]
        # The optimizer's variables have the whole path of a weight in one part.
        self._joined: dict[str, str] = {}
        joined = {"_".join(p): "_".join(map(self._rename, p)) for p in weights}
        self._joined = dict(sorted(joined.items(), key=lambda pair: -len(pair[0])))
        new = {path: tuple(map(self._rename, path)) for path in paths}
        if len(set(new.values())) < len(new):
            new = {path: path for path in paths}
        self._new = new
        self._old = {name: path for path, name in new.items()}

    def from_keras(self, tree: PyTree) -> PyTree:
        return _nest({self._new[path]: value for path, value in _flatten(tree)}, tree)

    def to_keras(self, tree: PyTree) -> PyTree:
        """Returns a state tree, or some groups of one, by Keras's names."""
        return _nest({self._old[path]: value for path, value in _flatten(tree)}, tree)

    def _rename(self, part: str) -> str:
        base, number = _split(part)
        if base in self._bases:
            rank = self._ranks[base].index(number)
            return f"{base}_{rank}" if rank else base
        for joined, renamed in self._joined.items():
            if part.startswith(f"{joined}_"):
                return renamed + part[len(joined) :]
        return part


def _split(part: str) -> tuple[str, int]:
    match = _NUMBERED.fullmatch(part)
    assert match is not None
    return match[1], int(match[2] or 0)


def _snake_case(cls: type) -> str:
    """Returns the name that Keras gives to the first object of a class."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", cls.__name__)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def _optimizers(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer, and those that it wraps, such as one that scales losses."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _layers(model: Any) -> Iterator[Any]:
    yield from model._flatten_layers()


def _flatten(
    tree: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*above, name))
        else:
            yield (*above, name), value


def _nest(
    leaves: Mapping[tuple[str, ...], Any], groups: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns nested dicts of leaves; empty groups stay."""
    return {group: {} for group in groups} | _state.tree.nest_values(leaves.items())
