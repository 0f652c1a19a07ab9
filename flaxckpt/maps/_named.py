"""Maps by name, as in options, files and on the command line."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flaxckpt import errors
from flaxckpt._state.leaf import LeafTable
from flaxckpt._types import LeafPath, PathLike, PyTree
from flaxckpt.formats import _locate
from flaxckpt.maps._detect import Detected, detect, find
from flaxckpt.maps._families import FAMILIES
from flaxckpt.maps._family import Family
from flaxckpt.transforms import Transform, _export
from flaxckpt.transforms._base import apply
from flaxckpt.transforms._names import parse_name

AUTO = "auto"
"""The name for the family of the configuration."""

_DEEPEST_PREFIX = 2
_MAX_PREFIXES = 20


def check_name(option: str, name: str) -> None:
    """Raises OptionError if `name` is neither `auto` nor a family.

    Args:
        option: The option with the name, for the message.
        name: The name.
    """
    names = [family.name for family in FAMILIES]
    if name != AUTO and name not in names:
        raise errors.OptionError(
            f"{option} must be {AUTO!r} or one of {', '.join(names)}, got {name!r:.80}"
        )


def find_for_state(
    name: str, source: PathLike, abstract_state: PyTree
) -> list[Transform]:
    """Returns the map of a published model to a state; see `maps.find`.

    Raises:
        OptionError: The model is not of the family `name`, or no layout fits.
    """
    _check_family(name, source)
    return find(source, abstract_state)


def find_for_layout(
    name: str, source: PathLike, target: str | None, prefix: LeafPath = ""
) -> list[Transform]:
    """Returns the map of a published model to a target layout.

    Args:
        name: Name of the family, or `auto`.
        source: The published model.
        target: The layout.
        prefix: Leaf path of the parameters in the new checkpoint.

    Raises:
        OptionError: The model is not of this family, or there is no such layout.
    """
    detected = _check_family(name, source)
    family = detected.family
    if target is None:
        raise errors.OptionError(
            f"maps.{family.name} needs a target: one of {', '.join(family.targets)}"
        )
    base = f"{family.base}/"
    table = apply(detected.transforms, _locate.open_checkpoint(source).table)
    is_alone = family.base and not any(path.startswith(base) for path in table)
    options = {"source_base": ""} if is_alone else {}
    if is_alone and family.target_bases.get(target):
        options["target_base"] = ""
    mapped = family(detected.config, target=target, prefix=prefix, **options)
    return [*detected.transforms, *mapped]


def _check_family(name: str, source: PathLike) -> Detected:
    check_name("the map", name)
    detected = detect(source)
    if name not in (AUTO, detected.family.name):
        raise errors.OptionError(
            f"{source} is of maps.{detected.family.name}, not of maps.{name}:"
            f" {detected.evidence}"
        )
    return detected


# ---- the way back -------------------------------------------------------------------


def find_for_export(
    name: str,
    config: Mapping[str, Any] | None,
    table: LeafTable,
    *,
    target: str | None = None,
    prefix: LeafPath | None = None,
) -> list[Transform]:
    """Returns the map of a published model to the parameters of a checkpoint.

    The target layout and the prefix are those whose names the checkpoint has.

    Args:
        name: Name of the family, or `auto` for that of the configuration.
        config: The configuration of the model.
        table: The leaves of the checkpoint.
        target: The layout, if known.
        prefix: Leaf path of the parameters, if known.

    Raises:
        OptionError: The family is unknown, or no layout fits the checkpoint.
    """
    if config is None:
        raise errors.OptionError(
            f"map={name!r} needs the config of the model: pass config=, such as the"
            " directory of the published model"
        )
    family = _family_of_config(name, config)
    table = _export.without_optimizer(table)
    found = list(_candidates(family, config, table, target, prefix))
    most = max(len(candidate.matched) for candidate in found)
    # With fewer names, leaves of the model would be left out.
    likely = [candidate for candidate in found if len(candidate.matched) == most]
    likely = likely if most else likely[:1]
    fitting: list[_Candidate] = []
    faults: dict[_Candidate, errors.OptionError] = {}
    for candidate in likely:
        try:
            _export.Export(tuple(candidate.changes))(table)
            fitting.append(candidate)
        except errors.OptionError as error:
            faults[candidate] = error
    if not fitting:
        raise _no_layout(family, faults)
    rivals = [c for c in likely if c in fitting or c.target == fitting[0].target]
    roots = dict.fromkeys(c.prefix for c in rivals if c.matched != fitting[0].matched)
    if roots:
        listed = [fitting[0].prefix, *roots]
        raise errors.OptionError(
            f"{' and '.join(repr(root) for root in listed)} both have the leaves of"
            f" maps.{family.name}: pass prefix={listed[0]!r}, or another of them"
        )
    return fitting[0].changes


def _no_layout(
    family: Family, faults: dict[_Candidate, errors.OptionError]
) -> errors.OptionError:
    """Returns the error for a checkpoint that no layout fits."""
    of_layouts = {candidate.target: faults[candidate] for candidate in reversed(faults)}
    if len(of_layouts) == 1:
        return next(iter(of_layouts.values()))
    rows = (f"{layout}: {errors.one_line(e, 200)}" for layout, e in of_layouts.items())
    return errors.OptionError(
        f"no layout of maps.{family.name} fits the checkpoint:\n{errors.rows(rows)}"
        "\nPass target and prefix, or a list of transforms as the map."
    )


def _family_of_config(name: str, config: Mapping[str, Any]) -> Family:
    check_name("map", name)
    if name != AUTO:
        return next(family for family in FAMILIES if family.name == name)
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise errors.OptionError(
        f"there is no map of the model_type {kind!r:.80}: there are maps of {known}."
        " Pass a list of transforms as the map"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """A map that may be that of a checkpoint.

    Attributes:
        target: The layout.
        prefix: Leaf path of the parameters.
        changes: The map.
        matched: The leaves that have a name of the layout.
    """

    target: str
    prefix: LeafPath
    changes: list[Transform]
    matched: frozenset[LeafPath]


def _candidates(
    family: Family,
    config: Mapping[str, Any],
    table: LeafTable,
    target: str | None,
    prefix: LeafPath | None,
) -> Iterator[_Candidate]:
    """Yields maps that may fit; of equally likely ones, the likelier prefix first."""
    layouts = family.targets if target is None else (target,)
    prefixes = _prefixes(table) if prefix is None else [prefix]
    for layout, root in itertools.product(layouts, prefixes):
        changes = family(config, target=layout, prefix=root)
        names = [tensor.target for tensor in family.tables[layout]]
        yield _Candidate(layout, root, changes, _matches(names, root, table))
        if base := family.target_bases.get(layout):  # the base model alone
            bases = {"source_base": "", "target_base": ""}
            changes = family(config, target=layout, prefix=root, **bases)
            names = [name.removeprefix(f"{base}/") for name in names]
            yield _Candidate(layout, root, changes, _matches(names, root, table))


def _matches(
    names: Iterable[str], prefix: LeafPath, table: LeafTable
) -> frozenset[LeafPath]:
    """Returns the leaves below `prefix` that have one of the names."""
    begin = f"{prefix}/" if prefix else ""
    pattern = re.compile("|".join(parse_name(name).pattern.pattern for name in names))
    return frozenset(
        path
        for path in table
        if path.startswith(begin) and pattern.fullmatch(path.removeprefix(begin))
    )


def _prefixes(table: LeafTable) -> list[LeafPath]:
    """Returns the outer containers of a checkpoint, those called `params` first."""
    found: dict[LeafPath, None] = {"": None}
    for path in table:
        parts = path.split("/")[:-1]
        for depth in range(1, min(_DEEPEST_PREFIX, len(parts)) + 1):
            found["/".join(parts[:depth])] = None
    ordered = sorted(found, key=lambda p: (not p.endswith("params"), p.count("/"), p))
    return ordered[:_MAX_PREFIXES]
