"""The sizes that a configuration states, compared with the shapes of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flaxckpt import errors
from flaxckpt._maps import model_config
from flaxckpt._types import LeafPath, Shape

_VOCABULARY = "vocab_size"


class Rule(NamedTuple):
    """The shape of tensors: pattern of their paths, and rules for `find_size`."""

    pattern: re.Pattern[str]
    axes: tuple[str, ...]


def check(
    title: str,
    rules: Sequence[Rule],
    config: Mapping[str, Any],
    shapes: Mapping[LeafPath, Shape],
    *,
    may_grow: bool = False,
) -> dict[str, int]:
    """Checks the shapes of tensors; sizes that the configuration lacks are not checked.

    `shapes` are under published names; others are ignored. All tensors may have the
    same larger vocabulary if `may_grow`. Returns the key of the larger vocabulary, and
    its size; empty if it has not grown. Raises OptionError for other shapes than the
    configuration states.
    """
    matched = dict(_match(rules, shapes))
    grown = _find_growth(matched, config, shapes) if may_grow else {}
    config = model_config.with_values(config, grown)
    faults: dict[LeafPath, str] = {}
    fitting: dict[str, set[int]] = {}
    for path, axes in matched.items():
        wanted = [_find_size(config, axis) for axis in axes]
        found = shapes[path]
        if all(size is None for _, size in wanted):
            continue
        if len(found) != len(wanted):
            faults[path] = f"wanted {_format(wanted)}, found {tuple(found)}"
            continue
        for (key, size), other in zip(wanted, found, strict=True):
            if size not in (None, other):
                faults[path] = f"wanted {_format(wanted)}, found {tuple(found)}"
                fitting.setdefault(key, set()).add(other)
    if faults:
        raise errors.OptionError(
            f"{title}: tensors contradict its config:\n"
            + errors.rows(f"{path}: {fault}" for path, fault in faults.items())
            + f"\n{_advise(fitting, config)}"
        )
    return grown


def _find_size(config: Mapping[str, Any], axis: str) -> tuple[str, int | None]:
    chosen = model_config.choose(config, axis)
    return (
        ("any", None)
        if chosen is None
        else (chosen, model_config.find_size(config, chosen))
    )


def _format(sizes: Sequence[tuple[str, int | None]]) -> str:
    named = (
        f"{key} {size}" if key[0].isalpha() and size else key for key, size in sizes
    )
    return f"({', '.join(named)})"


def _match(
    rules: Sequence[Rule], shapes: Mapping[LeafPath, Shape]
) -> Iterator[tuple[LeafPath, tuple[str, ...]]]:
    for path in shapes:
        for rule in rules:
            if rule.pattern.fullmatch(path):
                yield path, rule.axes
                break


def _find_growth(
    matched: Mapping[LeafPath, Sequence[str]],
    config: Mapping[str, Any],
    shapes: Mapping[LeafPath, Shape],
) -> dict[str, int]:
    """Returns the key of the vocabulary and its size, if all tensors have a larger."""
    found: dict[str, set[int]] = {}
    for path, axes in matched.items():
        for rule, size in zip(axes, shapes[path], strict=False):
            key = model_config.choose(config, rule)
            if key is not None and key.rpartition(".")[2] == _VOCABULARY:
                found.setdefault(key, set()).add(size)
    return {
        key: size
        for key, (size, *others) in found.items()
        if not others and size > (model_config.find_size(config, key) or size)
    }


def _advise(fitting: Mapping[str, set[int]], config: Mapping[str, Any]) -> str:
    """Returns advice, from the sizes of each key that the tensors have."""
    agreed = {
        key: min(sizes)
        for key, sizes in fitting.items()
        if len(sizes) == 1 and key.replace(".", "").isidentifier()
    }
    advice = "Pass the config of this model"
    if agreed:
        listed = ", ".join(f"{key} {size}" for key, size in agreed.items())
        advice += f", or correct its numbers: these tensors have {listed}"
    advice += "."
    for key, size in agreed.items():
        wanted = model_config.find_size(config, key) or size
        if key.rpartition(".")[2] == _VOCABULARY and size > wanted:
            advice += (
                " Rows that only pad the vocabulary, as those of MaxText, are left out"
                f" before the map back: slice(pattern, shape), to {wanted} rows."
            )
    return advice
