"""Maps by name, as in options, files and on the command line."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flaxckpt import errors
from flaxckpt._formats import locate
from flaxckpt._formats.reader import Stored
from flaxckpt._maps import detect
from flaxckpt._maps.detect import Detected
from flaxckpt._maps.families import FAMILIES
from flaxckpt._maps.family import Family
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms import export
from flaxckpt._transforms.base import apply
from flaxckpt._transforms.indexed_names import parse_name
from flaxckpt._types import LeafPath, PathLike, PyTree
from flaxckpt.transforms import Transform

AUTO = "auto"
"""The name for the family of the configuration."""

_DEEPEST_PREFIX = 2
_MAX_PREFIXES = 20


def check_name(option: str, name: str) -> None:
    """Raises OptionError if the `name` of an option is neither `auto` nor a family."""
    names = [family.name for family in FAMILIES]
    if name != AUTO and name not in names:
        raise errors.OptionError(
            f"{option} must be {AUTO!r} or one of {', '.join(names)}, got {name!r:.80}"
        )


def find_for_state(
    name: str, source: PathLike, abstract_state: PyTree
) -> list[Transform]:
    """Returns the map of a published model to a state; see `maps.find`."""
    stored = locate.open_checkpoint(source)
    detected = _detect_named(name, stored)
    return detect.find_detected(detected, stored.table, abstract_state)


def find_for_layout(
    name: str, source: PathLike, target: str | None, prefix: LeafPath = ""
) -> list[Transform]:
    """Returns the map of a published model to a target layout.

    `prefix` is the leaf path of the parameters in the new checkpoint.
    """
    stored = locate.open_checkpoint(source)
    detected = _detect_named(name, stored)
    family = detected.family
    if target is None:
        raise errors.OptionError(
            f"maps.{family.name} needs a target: one of {', '.join(family.targets)}"
        )
    table = apply(detected.transforms, stored.table)
    options = detect.source_options(family, table)
    if options and family.target_bases.get(target):
        options["target_base"] = ""
    mapped = family(detected.config, target=target, prefix=prefix, **options)
    return [*detected.transforms, *mapped]


def _detect_named(name: str, stored: Stored) -> Detected:
    check_name("the map", name)
    asked = next((family for family in FAMILIES if family.name == name), None)
    detected = detect.detect_stored(stored, asked)
    if asked not in (None, detected.family):
        raise errors.OptionError(
            f"{stored.metadata.path} is of maps.{detected.family.name}, not of"
            f" maps.{name}: {detected.evidence}"
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

    The family is `name`, or that of the configuration for `auto`. If not known, the
    target layout and the prefix of the parameters are those whose names the checkpoint
    has. Raises OptionError if none fits.
    """
    family = family_of_config(name, config)
    assert config is not None
    config = family.check_config(config)
    if target not in (None, *family.targets):
        family(config, target=str(target))  # raises
    table = export.without_optimizer(table)
    found = list(candidates(family, config, table, target, prefix))
    most = max(len(candidate.matched) for candidate in found)
    # With fewer names, leaves of the model would be left out.
    likely = [candidate for candidate in found if len(candidate.matched) == most]
    likely = likely if most else likely[:1]
    fitting: list[_MapCandidate] = []
    faults: dict[_MapCandidate, errors.OptionError] = {}
    for candidate in likely:
        try:
            candidate.changes = candidate.make()
            family.check_head(config, candidate.target)
            export.Export(tuple(candidate.changes))(table)
            fitting.append(candidate)
        except errors.OptionError as error:
            faults[candidate] = error
    if not fitting:
        raise detect.common_error([*faults.values()]) or _no_layout(family, faults)
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
    family: Family, faults: dict[_MapCandidate, errors.OptionError]
) -> errors.OptionError:
    of_layouts = {candidate.target: faults[candidate] for candidate in reversed(faults)}
    if len(of_layouts) == 1:
        return next(iter(of_layouts.values()))
    rows = (f"{layout}: {errors.one_line(e, 200)}" for layout, e in of_layouts.items())
    return errors.OptionError(
        f"no layout of maps.{family.name} fits the checkpoint:\n{errors.rows(rows)}"
        "\nPass target and prefix, or a list of transforms as the map."
    )


def family_of_config(name: str, config: Mapping[str, Any] | None) -> Family:
    check_name("map", name)
    if config is None:
        raise errors.OptionError(
            f"map={name!r} needs the config of the model: pass config=, such as the"
            " directory of the published model"
        )
    if name != AUTO:
        return next(family for family in FAMILIES if family.name == name)
    family = detect.find_family(config)
    if family is None:
        error = detect.unknown_family(config, "the model")
        raise errors.OptionError(f"{error}. Or pass a list of transforms as the map")
    return family


def family_of_export(
    map: str | Sequence[Transform], config: Mapping[str, Any] | None
) -> Family | None:
    if config is None:
        return None
    if isinstance(map, str) and map != AUTO:
        return family_of_config(map, config)
    return detect.find_family(config)


@dataclasses.dataclass(eq=False)
class _MapCandidate:
    """A map that may be that of a checkpoint.

    `matched` are the leaves that have a name of the layout; `changes` is the map, once
    it is made.
    """

    target: str
    prefix: LeafPath
    make: Callable[[], list[Transform]]
    matched: frozenset[LeafPath]
    changes: list[Transform] = dataclasses.field(default_factory=list)


def candidates(
    family: Family,
    config: Mapping[str, Any],
    table: LeafTable,
    target: str | None,
    prefix: LeafPath | None,
) -> Iterator[_MapCandidate]:
    """Yields maps that may fit; of equally likely ones, the likelier prefix first."""
    layouts = family.targets if target is None else (target,)
    prefixes = _prefixes(table) if prefix is None else [prefix]
    for layout, root in itertools.product(layouts, prefixes):
        make = functools.partial(family, config, target=layout, prefix=root)
        names = [tensor.target for tensor in family.tables[layout]]
        yield _MapCandidate(layout, root, make, _matches(names, root, table))
        base = family.target_bases.get(layout)
        # Below the base's name is a whole model, which perhaps has lost its head.
        if base and (prefix is not None or root.rpartition("/")[2] != base):
            alone = functools.partial(make, source_base="", target_base="")
            names = [name.removeprefix(f"{base}/") for name in names]
            yield _MapCandidate(layout, root, alone, _matches(names, root, table))


def _matches(
    names: Iterable[str], prefix: LeafPath, table: LeafTable
) -> frozenset[LeafPath]:
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
