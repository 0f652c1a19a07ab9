"""Finds the family of a checkpoint, and the map from it to a state."""

from __future__ import annotations

import collections
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxckpt import _state, _util, errors, transforms
from flaxckpt._formats import locate
from flaxckpt._formats.reader import Stored
from flaxckpt._maps import gguf, model_config
from flaxckpt._maps.families import FAMILIES
from flaxckpt._maps.family import Family
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms.base import apply
from flaxckpt._transforms.mirrors import outside
from flaxckpt._types import JSON, LeafPath, PathLike, PyTree, Shape
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)

_ENOUGH = 0.9
"""The fraction of a checkpoint's names that tells its family."""


_LEAST = 0.5
"""Of the leaves of a layout or of a state, more than this fraction must fit."""


class Detected(NamedTuple):
    """The family of a checkpoint.

    Attributes:
        family: The family.
        config: The configuration of the model.
        evidence: The reason.
        transforms: The transforms to the names and values of the family: those of a
            GGUF file, or those of the language model in a larger model; else empty.
    """

    family: Family
    config: Mapping[str, JSON]
    evidence: str
    transforms: tuple[Transform, ...] = ()

    def __str__(self) -> str:
        return f"{self.family.name}: {self.evidence}"


def detect(source: PathLike) -> Detected:
    """Returns the family of a checkpoint, by its `config.json` and its names.

    Args:
        source: A directory as published on Hugging Face, or a file in it; or a GGUF
            file, which has its configuration inside.

    Raises:
        OptionError: The family is unknown, or there is no configuration.
        CheckpointError: There is no checkpoint, or it cannot be read.
    """
    return detect_stored(locate.open_checkpoint(source))


def detect_stored(stored: Stored, family: Family | None = None) -> Detected:
    """Returns the family; `family` is that of a configuration without `model_type`."""
    if stored.metadata.format == gguf.FORMAT:
        return _detect_gguf(stored)
    path = stored.metadata.path
    by_name = _family_of_names(stored.table)
    if (config := find_config(stored)) is None:
        seems = "" if by_name is None else f", whose names are of maps.{by_name.name}"
        raise errors.OptionError(
            f"there is no {model_config.NAME} beside {path}{seems}: pass the"
            " configuration to the map of its family"
        )
    kind = config.get("model_type")
    if (known := find_family(config)) is not None:
        why = f"model_type of {model_config.NAME} is {kind!r}"
        return Detected(known, config, why)
    if kind is None and family is not None:
        return Detected(family, config, "as asked for")
    if kind is None and by_name is not None:
        return Detected(by_name, config, "by the names of its tensors")
    if (language := _detect_language_model(config, stored.table)) is not None:
        return language
    raise unknown_family(config, path)


def find_config(stored: Stored) -> dict[str, JSON] | None:
    """Returns the configuration beside a checkpoint; None without such a file."""
    path = Path(stored.metadata.path)
    directory = path if path.is_dir() else path.parent
    is_there = (directory / model_config.NAME).is_file()
    return model_config.read_config(directory) if is_there else None


def find_family(config: Mapping[str, Any]) -> Family | None:
    """Returns the family of a configuration, by its `model_type`; None if unknown."""
    kind = config.get("model_type")
    return next((f for f in FAMILIES if kind in f.model_types), None)


def unknown_family(config: Mapping[str, Any], subject: str) -> errors.OptionError:
    kind = config.get("model_type")
    if kind is None:
        return errors.OptionError(
            f"{subject} has no model_type in its config: pass the name of the family"
            " as the map, such as 'llama'"
        )
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    if (family := find_family(language_config(config))) is not None:
        advice = (
            f"its text_config is of maps.{family.name}, so for its language model"
            " alone pass config['text_config'] as the config"
        )
    else:
        advice = "flaxckpt.suggest finds one by names and shapes"
    return errors.OptionError(
        f"{subject} is of a {kind!r:.80}, which has no map: there are maps of {known};"
        f" {advice}"
    )


# ---- the language model in a larger model -------------------------------------------

_LANGUAGE_MODEL = ("language_model/", "model/language_model/")
"""Beginnings of its names, in releases of transformers."""


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the configuration of the language model in a larger model, or empty."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return {}
    quantization = config.get(model_config.QUANTIZATION)  # is stated for all parts
    return (
        inner
        if quantization is None
        else {model_config.QUANTIZATION: quantization, **inner}
    )


def _detect_language_model(
    config: Mapping[str, JSON], table: LeafTable
) -> Detected | None:
    """Returns the language model in a model that also reads images; None without."""
    inner = language_config(config)
    family = find_family(inner)
    begin = next(
        (b for b in _LANGUAGE_MODEL if any(path.startswith(b) for path in table)), None
    )
    if family is None or begin is None:
        return None
    own = f"{begin}.*|lm_head/.*"
    base = f"{family.base}/" if begin.startswith("model/") else ""
    found = (transforms.keep(own), transforms.rename(f"{begin}(.*)", rf"{base}\1"))
    left = sum(not re.fullmatch(own, path) for path in table)
    kind = config.get("model_type")
    why = (
        f"the language model of a {kind!r}, by its text_config, without"
        f" {_util.humanize.count(left, 'leaf', 'leaves')} of other parts"
    )
    _log.info("%s: %s", family.name, why)
    return Detected(family, inner, why, found)


def _detect_gguf(stored: Stored) -> Detected:
    config = gguf.make_config(stored)
    kind = config["model_type"]
    family = next(family for family in FAMILIES if kind in family.model_types)
    published = tuple(gguf.to_published(family, config))
    return Detected(family, config, f"its architecture is that of {kind!r}", published)


def _family_of_names(table: LeafTable) -> Family | None:
    """Returns the only family that knows nearly all names of a checkpoint."""
    fitting = []
    for family in FAMILIES:
        patterns = family.source_patterns
        known = sum(any(p.fullmatch(path) for p in patterns) for path in table)
        if known >= _ENOUGH * len(table):
            fitting.append(family)
    return fitting[0] if len(fitting) == 1 else None


# ---- the target ---------------------------------------------------------------------


class _Candidate(NamedTuple):
    """A target layout, and how well it fits a state.

    It fills `matched` parameters, and makes `mapped` leaves, in the containers
    `prefixes`; `error` says why it does not apply.
    """

    target: str
    options: Mapping[str, str]
    matched: int = 0
    mapped: int = 0
    lacking: tuple[str, ...] = ()
    error: errors.OptionError | None = None
    prefixes: tuple[LeafPath, ...] = ()

    @property
    def fits(self) -> bool:
        """True unless only a few leaves fit, of the model and of the state."""
        of_state = self.matched + len(self.lacking)
        return self.matched > _LEAST * min(self.mapped, of_state)

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.target}: {errors.one_line(self.error, 200)}"
        first = f", but not {errors.first_few(self.lacking, 2)}" if self.lacking else ""
        return f"{self.target}: fits {self.matched} of {self.mapped} leaves{first}"


def find(source: PathLike, abstract_state: PyTree) -> list[Transform]:
    """Returns the map from a published model to a state.

    The family is that of the checkpoint's `config.json`; the target layout is the only
    one whose names and shapes fill the parameters of the state.

    ```python
    state = load("llama/", state, transforms=maps.find("llama/", state), missing="init")
    ```

    Args:
        source: A directory as published on Hugging Face, or a file in it; or a GGUF
            file.
        abstract_state: The state to fill, abstract or not.

    Raises:
        OptionError: The family is unknown, or no target layout fits the state.
        CheckpointError: There is no checkpoint, or it cannot be read.
    """
    stored = locate.open_checkpoint(source)
    return find_detected(detect_stored(stored), stored.table, abstract_state)


def find_detected(
    detected: Detected, table: LeafTable, abstract_state: PyTree
) -> list[Transform]:
    """Returns the map from a checkpoint of a known family to a state; see `find`."""
    table = apply(detected.transforms, table)
    wanted = _parameters(abstract_state)
    candidates = [
        _try(detected, target, options, table, wanted)
        for target, options in _options(detected.family, table)
    ]
    if (error := common_error([c.error for c in candidates])) is not None:
        raise error
    best = max(candidates, key=lambda candidate: candidate.matched)
    if not best.fits:
        listed = {str(candidate): None for candidate in candidates}
        raise errors.OptionError(
            f"no layout of maps.{detected.family.name} fits the state:\n"
            + errors.rows(listed)
            + f"\nThe state has {errors.first_few(list(wanted), 3)}."
        )
    if len(best.prefixes) > 1:
        raise errors.OptionError(
            f"{' and '.join(best.prefixes)} both have the leaves of"
            f" maps.{detected.family.name}: pass the map to one of them, as in"
            f" maps.{detected.family.name}(config, target={best.target!r},"
            f" prefix={best.prefixes[0]!r})"
        )
    mapped = detected.family(detected.config, target=best.target, **best.options)
    return [*detected.transforms, *mapped]


def _parameters(state: PyTree) -> dict[LeafPath, Shape]:
    """Returns the shapes of a state's arrays, without those of its optimizers."""
    table = _state.flax_state.flatten(state).table_with_roles()
    leaves = outside(table).items()
    return {path: leaf.info.shape for path, leaf in leaves if leaf.info.kind == "array"}


def source_options(family: Family, table: LeafTable) -> dict[str, str]:
    """Returns the argument of a family for a checkpoint of the base model alone."""
    has_base = any(path.startswith(f"{family.base}/") for path in table)
    return {} if has_base or not family.base else {"source_base": ""}


def _options(family: Family, table: LeafTable) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the target layouts, with and without the names of the base model."""
    source = source_options(family, table)
    for target in family.targets:
        yield target, source
        if family.target_bases.get(target):
            yield target, {**source, "target_base": ""}


def _try(
    detected: Detected,
    target: str,
    options: Mapping[str, str],
    table: LeafTable,
    wanted: Mapping[LeafPath, Shape],
) -> _Candidate:
    """Returns how well a target layout fits the parameters `wanted`."""
    try:
        changes = detected.family(detected.config, target=target, **options)
        mapped = apply(changes, table)
    except errors.OptionError as error:
        return _Candidate(target, options, error=error)
    shapes = {path: leaf.info.shape for path, leaf in mapped.items()}
    named = [
        (path.removesuffix(name).rstrip("/"), shapes[name] == shape)
        for path, shape in wanted.items()
        for name in _state.tree.suffixes(path)
        if name in shapes
    ]
    prefixes = collections.Counter(prefix for prefix, is_equal in named if is_equal)
    likely = prefixes or collections.Counter(prefix for prefix, _ in named)
    if not likely:
        return _Candidate(target, options, mapped=len(mapped))
    prefix = likely.most_common(1)[0][0]
    matched = prefixes[prefix]
    equal = tuple(p for p, count in prefixes.items() if count == matched)
    below = _state.tree.inside(prefix)
    lacking = [
        f"{path} {wanted[path]}" + (f", found {found}" if found else "")
        for path in wanted
        if path.startswith(below)
        and (found := shapes.get(path.removeprefix(below))) != wanted[path]
    ]
    if prefix:
        options = {**options, "prefix": prefix}
    return _Candidate(
        target, options, matched, len(mapped), tuple(lacking), prefixes=equal
    )


def common_error(
    found: Sequence[errors.OptionError | None],
) -> errors.OptionError | None:
    """Returns the error of all candidates, if they have the same."""
    texts = {str(error) for error in found}
    return found[0] if len(texts) == 1 else None
