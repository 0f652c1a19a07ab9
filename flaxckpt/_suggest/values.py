"""Changes of values that names and shapes do not show, but the tables of maps know."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flaxckpt import _state, errors
from flaxckpt._formats.reader import Stored
from flaxckpt._maps import detect, gguf, model_config
from flaxckpt._maps.families import FAMILIES
from flaxckpt._maps.family import Family, Tensor
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms import base as _transforms
from flaxckpt._transforms.indexed_names import parse_name
from flaxckpt._types import LeafPath
from flaxckpt.transforms import Transform

# ---- GGUF files, and quantized models ------------------------------------------------


class Published(NamedTuple):
    """A checkpoint with the names and values that Hugging Face publishes.

    Attributes:
        transforms: The transforms to them; empty unless it is a GGUF file.
        table: The leaves after these transforms.
        doubt: The reason why leaves may not be weights of the model, or not those
            published; empty if none.
    """

    transforms: tuple[Transform, ...]
    table: LeafTable
    doubt: str = ""


def publish(stored: Stored, wanted: Iterable[LeafPath]) -> Published:
    """Undoes the changes of values in a GGUF file, if its architecture is known.

    The values of quantized models, which a `config.json` tells, stay as they are. A
    state with the names of llama.cpp gets the values as they are.
    """
    as_stored = Published((), stored.table)
    if stored.metadata.format != gguf.FORMAT:
        entry = model_config.describe_quantization(detect.find_config(stored) or {})
        doubt = (
            f"{model_config.NAME} has a {entry}: leaves may be values without their"
            " scales"
        )
        return as_stored if entry is None else as_stored._replace(doubt=doubt)
    if any(end in stored.table for p in wanted for end in _state.tree.suffixes(p)):
        return as_stored
    try:
        transforms = detect.detect_stored(stored).transforms
        return Published(transforms, _transforms.apply(transforms, stored.table))
    except errors.OptionError as error:
        doubt = (
            "llama.cpp stores some tensors with other values than were published, such"
            f" as norms plus 1, and this file has no map: {errors.one_line(error, 200)}"
        )
        return as_stored._replace(doubt=doubt)


# ---- layouts ------------------------------------------------------------------------

_ENOUGH = 0.9
"""The fraction of the leaves in a container that shows its layout."""


_LARGE = re.compile("(?<![0-9])([2-9]|[1-9][0-9]+)(?![0-9])")
"""Numbers of layers but the first two: leaves of the others are alike."""


class ValueChange(NamedTuple):
    """The changes of the values of a leaf in the layouts that it may belong to.

    A change -> the layouts with it, each with its families.
    """

    layouts: Mapping[str, Mapping[str, Sequence[str]]]

    @property
    def texts(self) -> frozenset[str]:
        """The changes, without the layouts."""
        return frozenset(self.layouts)

    def __str__(self) -> str:
        listed = ", or ".join(
            f"{text} in {' and '.join(_say(*layout) for layout in layouts.items())}"
            for text, layouts in self.layouts.items()
        )
        return f"values may be {listed}, which shapes do not show"


def _say(target: str, families: Sequence[str]) -> str:
    return f"{target} of {', '.join(families)}"


def find_changes(paths: Iterable[LeafPath]) -> dict[LeafPath, ValueChange]:
    """Returns leaf path -> the change of its values in the layout that it belongs to.

    `paths` are those of a model.
    """
    alike: dict[str, list[LeafPath]] = defaultdict(list)
    for path in paths:
        alike[_LARGE.sub("2", path)].append(path)
    inside: Counter[LeafPath] = Counter()
    for name, same in alike.items():
        for end in _state.tree.suffixes(name):
            inside[name.removesuffix(end)] += len(same)
    fitting: dict[LeafPath, list[_Fit]] = defaultdict(list)
    for layout in _layouts():
        for container, rows in _matches(layout, alike).items():
            count = sum(len(alike[name]) for name in rows)
            below = _state.tree.inside(container)
            if count >= _ENOUGH * inside[below]:
                fitting[container].append(_Fit(count, layout, rows))
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for fits in fitting.values():
        most = max(fit.size for fit in fits)
        for fit in fits:
            for name, texts in fit.rows.items() if fit.size == most else ():
                for text in texts:
                    layouts = found.setdefault(name, {}).setdefault(text, {})
                    layouts.setdefault(fit.layout.target, []).append(fit.layout.family)
    return {
        path: ValueChange(layouts)
        for name, layouts in found.items()
        for path in alike[name]
    }


class _Layout(NamedTuple):
    """A target layout of a family.

    `rows` has the pattern of each row's target, with the changes of its values, by the
    last two components that leaves may have.
    """

    family: str
    target: str
    rows: Mapping[str, Sequence[tuple[re.Pattern[str], tuple[str, ...]]]]


class _Fit(NamedTuple):
    """A layout that `size` leaves of a container may have, with changes of values."""

    size: int
    layout: _Layout
    rows: Mapping[str, tuple[str, ...]]


@functools.cache
def _layouts() -> tuple[_Layout, ...]:
    layouts = []
    for family in FAMILIES:
        for target, tensors in family.tables.items():
            rows = defaultdict(list)
            for one in tensors:
                row = parse_name(one.target).pattern, _changes(one, tensors, family)
                for last in _last_words(one.target):
                    rows[last].append(row)
            layouts.append(_Layout(family.name, target, rows))
    return tuple(layouts)


def _last_words(name: str) -> set[str]:
    """Returns the last two components that leaves of a row may have."""
    pieces = re.split(r"\{([^{}]*)\}", name)
    options = [
        [piece] if at % 2 == 0 else (piece.partition(":")[2] or "0").split("|")
        for at, piece in enumerate(pieces)
    ]
    texts = ("".join(one) for one in itertools.product(*options))
    return {_last(text) for text in texts}


def _last(path: LeafPath) -> str:
    """Returns the last two components of a path, without numbers."""
    return re.sub("[0-9]+", "#", "/".join(path.split("/")[-2:]))


def _changes(
    tensor: Tensor, table: Sequence[Tensor], family: Family
) -> tuple[str, ...]:
    changes = []
    if tensor.times is not None:
        size = str(family.sizes[tensor.times]).partition("|")[0]
        changes.append(f"multiplied by {size} ** {tensor.exponent:g}")
    if tensor.plus:
        changes.append(f"greater by {tensor.plus:g}")
    changes += [
        f"reordered by {other.form!r} if {other.when}"
        for other in table
        if other.target == tensor.target
        and other.form != tensor.form
        and not other.when.startswith("not ")
    ]
    return tuple(changes)


def _matches(
    layout: _Layout, names: Iterable[str]
) -> dict[LeafPath, dict[str, tuple[str, ...]]]:
    """Returns container -> name of a leaf of the layout in it -> its changes."""
    found: dict[LeafPath, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for name in names:
        lasts = {_last(name), _last(name.rpartition("/")[2])}
        known = [row for last in lasts for row in layout.rows.get(last, ())]
        for end in _state.tree.suffixes(name) if known else ():
            rows = [texts for pattern, texts in known if pattern.fullmatch(end)]
            if rows:
                container = name.removesuffix(end).rstrip("/")
                found[container][name] = max(rows, key=len)
    return found
