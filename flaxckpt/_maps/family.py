"""Families of published models, each a table of its tensors for every target layout."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from flaxckpt import errors, transforms
from flaxckpt._maps import model_config, model_sizes
from flaxckpt._maps.checked import CheckedMap, Side
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms.axis_form import Form
from flaxckpt._transforms.base import TableTransform, call
from flaxckpt._transforms.indexed_names import parse_name
from flaxckpt._transforms.remap import make_remap
from flaxckpt._transforms.tie import make_tie
from flaxckpt._types import JSON, LeafPath, Shape
from flaxckpt.transforms import Row, Transform

_log = logging.getLogger(__name__)

_PADDED = ("maxtext", "maxtext-scanned")
"""Layouts whose programs pad vocabularies: theirs are not larger on purpose."""

_FIRST = re.compile(r"\+([A-Za-z]\w*)\}")
"""The size at which an index begins: `+first}` of `{i+first}`."""


class Tensor(NamedTuple):
    """A tensor of a family, or of all layers of it, and its place in a target layout.

    Attributes:
        source: Its name in a checkpoint of Hugging Face, with indices in braces;
            `{i+first}` begins at a size of the family.
        target: Its leaf path in the target layout.
        form: The axes of both, in einops notation; None if they are equal.
        when: The condition on the configuration under which there is such a tensor.
        optional: True if checkpoints may lack it, or the condition on the
            configuration under which they may.
        is_head: True if checkpoints of the base model alone lack it.
        module: The name of the module it belongs to, if checkpoints that lack one
            tensor of the module lack all.
        times: The size whose power `exponent` the values are multiplied with.
        exponent: See `times`.
        factor_dtype: The type that this factor is rounded to, if any.
        plus: The target's values are greater by this number.
    """

    source: str
    target: str
    form: str | None = None
    when: str = ""
    optional: bool | str = False
    is_head: bool = False
    module: str = ""
    times: str | None = None
    exponent: float = 1
    factor_dtype: str | None = None
    plus: float = 0


_HEAD = re.compile(r"(For(?!CausalLM|ConditionalGeneration)[A-Z]\w*|DoubleHeads)")
"""The end of the name of a class with another head than that of the vocabulary."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of published models: call it for the transforms of one of them.

    Attributes:
        name: The name of the family.
        model_types: `model_type` of the configurations.
        base: The beginning of the names of the base model's tensors, which a checkpoint
            of the base model alone lacks: `bert`.
        sizes: Axis or index -> its rule in the configuration; see `find_size`.
        tables: Target layout -> its tensors.
        defaults: Values of keys that configurations may lack.
        ignored: Pattern of the leaf paths of buffers, which are left out.
        copies: Tensor that checkpoints may have twice -> its other name, which has a
            row. Where the first has no row, such as a tied head, it is left out, and
            must be equal.
        target_bases: Target layout -> the beginning that the base model has there.
        old_names: The end of a leaf path in old checkpoints -> its end in new ones.
        unpublished: Target layout -> pattern of leaf paths there that published models
            lack, because they do not change outputs; the map back leaves them out.
        shapes: Name of tensors in a checkpoint of Hugging Face -> the size of each
            axis, as rules that are joined by spaces; see `find_size`.
        refused: Condition on the configuration, and on the `target` -> why such models
            have no map.
    """

    name: str
    model_types: tuple[str, ...]
    base: str
    sizes: Mapping[str, str | int]
    tables: Mapping[str, Sequence[Tensor]]
    defaults: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    ignored: str = ""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    target_bases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    old_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unpublished: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shapes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def targets(self) -> tuple[str, ...]:
        """The target layouts."""
        return tuple(self.tables)

    def __call__(
        self,
        config: model_config.Config,
        *,
        target: str,
        prefix: LeafPath = "",
        source_base: str | None = None,
        target_base: str | None = None,
    ) -> list[Transform]:
        """Returns the transforms from a checkpoint of Hugging Face to a layout.

        ```python
        load("llama/", model, transforms=maps.llama("llama/", target="tunix"))
        ```

        Args:
            config: The configuration: a dict, the path of a `config.json` or of its
                directory, or a configuration of transformers.
            target: The layout of the state; see `targets`.
            prefix: Leaf path of the parameters in the state, such as `params`.
            source_base: The beginning of the base model's names in the checkpoint, in
                place of the family's; empty for a checkpoint of the base model alone.
            target_base: Likewise in the state.

        Raises:
            OptionError: The configuration is of another family or of a quantized model,
                or lacks a size, or there is no such target. When applied: tensors are
                missing, unknown, or do not fit.
        """
        if target not in self.tables:
            raise errors.OptionError(
                f"maps.{self.name} has no target {target!r:.80}; it has"
                f" {', '.join(self.tables)}"
            )
        content = self.check_config(config)
        self._check_refused(content, target)
        tensors = self._tensors(target, content)
        rows = tensors[0]
        bases = (
            _Base(self.base, source_base),
            _Base(self.target_bases.get(target, ""), target_base),
        )
        sizes = self._sizes(content, rows)
        name = call(
            f"maps.{self.name}",
            _short_config(content),
            target=target,
            prefix=prefix or None,
            source_base=source_base,
            target_base=target_base,
        )
        listed = [self._row(tensor, bases, prefix) for tensor in rows]
        remap = make_remap(
            listed,
            sizes,
            rest="error",
            ignored=self.ignored or None,
            ignored_by_inverse=self.unpublished.get(target),
            inverse_within=self._within(target, prefix, target_base),
            name=name,
        )
        checked = CheckedMap(
            remap,
            self._title,
            content,
            (
                self._side(0, tensors, bases, prefix, self.ignored),
                self._side(1, tensors, bases, prefix, self.unpublished.get(target, "")),
            ),
            self._shape_rules(bases[0]),
            may_grow=target not in _PADDED,
        )
        changes: list[Transform] = [checked, *_values(rows, listed, sizes)]
        if copies := self._copies(target, rows, bases[0]):
            changes.insert(0, copies)
        if self.old_names:
            changes.insert(0, NewNames(self.name, self.old_names))
        return changes

    def fit_vocabulary(
        self, config: Mapping[str, Any], shapes: Mapping[LeafPath, Shape]
    ) -> dict[str, Any]:
        """Returns a configuration with the vocabulary of tensors, if it has grown.

        `shapes` are those of the tensors, under their published names. Raises
        OptionError if they contradict the configuration otherwise.
        """
        has_base = any(path.startswith(f"{self.base}/") for path in shapes)
        rules = self._shape_rules(_Base(self.base, None if has_base else ""))
        content = {**self.defaults, **config}
        grown = model_sizes.check(self._title, rules, content, shapes, may_grow=True)
        for key, size in grown.items():
            _log.warning(
                "config.json gets %s %d, not %d: the vocabulary of the model grew",
                key,
                size,
                model_config.look_up(content, key),
            )
        return model_config.with_values(config, grown)

    @property
    def _title(self) -> str:
        return f"maps.{self.name}"

    def _shape_rules(self, base: _Base) -> tuple[model_sizes.Rule, ...]:
        return tuple(
            model_sizes.Rule(
                parse_name(base.apply(name.replace(".", "/"))).pattern,
                tuple(axes.split()),
            )
            for name, axes in self.shapes.items()
        )

    def _side(
        self,
        at: int,
        tensors: tuple[Sequence[Tensor], Sequence[Tensor]],
        bases: tuple[_Base, _Base],
        prefix: LeafPath,
        ignored: str,
    ) -> Side:
        """Returns the names of published models (`at` is 0), or of the layout (1)."""
        option = ("source_base", "target_base")[at]

        def name(tensor: Tensor, bases: tuple[_Base, _Base]) -> str:
            row = self._row(tensor, bases, prefix)
            return row.target if at else row.source

        rows, others = tensors
        switched = bases[0].switched(), bases[1].switched()
        both = {name(tensor, bases): name(tensor, switched) for tensor in rows}
        modules: dict[str, list[str]] = {}
        for tensor in rows:
            if tensor.module and self._row(tensor, bases, prefix).optional:
                modules.setdefault(tensor.module, []).append(name(tensor, bases))
        return Side(
            frozenset(both),
            {one: other for one, other in both.items() if one != other},
            f"pass {option}='' for the base model alone"
            if bases[at].new is None
            else f"leave {option}='' out, which is for the base model alone",
            {name(tensor, bases): tensor.when for tensor in others},
            {
                name(tensor, bases): tensor.optional
                for tensor in rows
                if isinstance(tensor.optional, str)
                and not self._row(tensor, bases, prefix).optional
            },
            tuple(modules.values()),
            ignored,
        )

    def check_config(self, config: model_config.Config) -> dict[str, Any]:
        """Returns a configuration as a dict, with the family's defaults.

        Raises OptionError if it is of another family or a quantized model.
        """
        content = model_config.read_config(config)
        found = content.get("model_type")
        if found is not None and found not in self.model_types:
            advice = "maps.detect(source) finds the family"
            if (
                model_config.look_up(content, "text_config.model_type")
                in self.model_types
            ):
                advice = (
                    "for its language model alone pass config['text_config'], under the"
                    " names without language_model; maps.find(source, state) does so"
                )
            raise errors.OptionError(
                f"the config is of a {found!r:.80}, wanted"
                f" {' or '.join(map(repr, self.model_types))}: {advice}"
            )
        model_config.check_not_quantized(content)
        return {**self.defaults, **model_config.with_old_keys(content)}

    def check_head(self, config: Mapping[str, Any], target: str) -> None:
        """Raises OptionError if a configuration's class has a head without rows."""
        name = model_config.find_class(config)
        kind = _HEAD.search(name)
        if kind is None:
            return
        # Rows that an unknown class has as well, such as that of `lm_head`, are not
        # those of its head.
        heads, others = (
            {
                tensor
                for tensor in rows
                if tensor.is_head and tensor.optional is not True
            }
            for rows, _ in (
                self._tensors(target, {**config, "architectures": [one]})
                for one in (name, "ForAnother")
            )
        )
        if heads - others:
            return
        raise errors.OptionError(
            f"the config says that the model is a {name:.80}, but maps.{self.name} with"
            f" target={target!r} has no head {kind[0]}: pass the config with the"
            " architectures that the leaves are of, or a list of transforms as the map"
        )

    def _check_refused(self, config: Mapping[str, Any], target: str) -> None:
        """Raises OptionError for a model that has no map to a layout."""
        for condition, why in self.refused.items():
            if model_config.holds({**config, "target": target}, condition):
                key = re.split("=| and ", condition.removeprefix("not "))[0]
                raise errors.OptionError(
                    f"maps.{self.name} with target={target!r} has no place for {key}"
                    f" {model_config.look_up(config, key)!r:.80} of the config: {why}"
                )

    @functools.cached_property
    def source_patterns(self) -> tuple[re.Pattern[str], ...]:
        """Patterns of the leaf paths of published models, with and without the base."""
        sources = {row.source for rows in self.tables.values() for row in rows}
        names = [_FIRST.sub("}", source).replace(".", "/") for source in sources]
        names += [name.removeprefix(f"{self.base}/") for name in names]
        return tuple(parse_name(name).pattern for name in dict.fromkeys(names))

    def _tensors(
        self, target: str, config: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the tensors that the model of a configuration has, and the others."""
        tensors, others = [], []
        for tensor in self.tables[target]:
            if not model_config.holds(config, tensor.when):
                source = _FIRST.sub("}", tensor.source)
                others.append(tensor._replace(source=source))
                continue
            source = _FIRST.sub(
                lambda match: f"+{self._size(config, match[1])}}}", tensor.source
            )
            indices = self.sizes.keys() & {*parse_name(source).axes}
            if all(self._size(config, index) for index in indices):
                optional = tensor.optional
                if isinstance(optional, str) and model_config.holds(config, optional):
                    optional = True
                tensors.append(tensor._replace(source=source, optional=optional))
        return tensors, others

    def _size(self, config: Mapping[str, Any], axis: str) -> int:
        size = model_config.find_size(config, self.sizes[axis])
        if size is None:
            raise errors.OptionError(
                f"the config lacks {self.sizes[axis]}, which maps.{self.name} needs;"
                f" it has {errors.first_few(sorted(config), 8) or 'nothing'}"
            )
        return size

    def _sizes(
        self, config: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> dict[str, int]:
        """Returns the sizes that the tensors need."""
        needed = {t.times for t in tensors if t.times}
        for tensor in tensors:
            needed |= {*parse_name(tensor.source).axes, *parse_name(tensor.target).axes}
            if tensor.form is not None:
                needed |= Form.parse(tensor.form, {}).names
        return {axis: self._size(config, axis) for axis in self.sizes if axis in needed}

    def _within(self, target: str, prefix: LeafPath, base: str | None) -> str:
        """Returns the beginning of the paths of all leaves that the map back knows."""
        own = self.target_bases.get(target, "")
        parts = prefix.split("/") if prefix else []
        if base == "" and own and parts[-1:] == [own]:
            parts.pop()  # the base model in its place beside a head
        return "/".join(parts) + "/" if parts else ""

    def _copies(
        self, target: str, rows: Sequence[Tensor], base: _Base
    ) -> Transform | None:
        """Returns the transform that leaves out equal copies, if there are any."""
        names = {row.source for row in rows}
        untied = {tensor.source for tensor in self.tables[target]}
        pairs = {
            base.apply(copy.replace(".", "/")): (
                base.apply(kept.replace(".", "/")),
                copy in untied,
            )
            for copy, kept in self.copies.items()
            if copy not in names
        }
        return Copies(self.name, pairs) if pairs else None

    def _row(self, tensor: Tensor, bases: tuple[_Base, _Base], prefix: LeafPath) -> Row:
        source = bases[0].apply(tensor.source.replace(".", "/"))
        target = bases[1].apply(tensor.target)
        target = f"{prefix}/{target}" if prefix else target
        is_base_alone = "" in (bases[0].new, bases[1].new)
        # A condition that is left did not hold.
        optional = tensor.optional is True or (tensor.is_head and is_base_alone)
        return Row(source, target, tensor.form, optional)


class _Base(NamedTuple):
    """The beginning of the base model's names, and what stands in its place."""

    old: str
    new: str | None

    def switched(self) -> _Base:
        """Returns the names of the whole model for those of the base alone, or back."""
        return self._replace(new={None: "", "": None}.get(self.new, self.new))

    def apply(self, name: str) -> str:
        if self.new is None or not self.old or not name.startswith(f"{self.old}/"):
            return name
        rest = name.removeprefix(f"{self.old}/")
        return f"{self.new}/{rest}" if self.new else rest


@dataclasses.dataclass(frozen=True)
class NewNames(TableTransform):
    """Renames leaves of old checkpoints; the map back keeps the new names."""

    family: str
    ends: Mapping[str, str]

    def __call__(self, table: LeafTable) -> LeafTable:
        rules = {
            f"(.*){re.escape(end)}": rf"\1{new}"
            for end, new in self.ends.items()
            if any(path.endswith(end) for path in table)
        }
        return transforms.rename(rules)(table) if rules else table

    def __str__(self) -> str:
        return call(f"maps.{self.family}.new_names")

    def inverse(self) -> Transform:
        return self


@dataclasses.dataclass(frozen=True)
class Copies(TableTransform):
    """Leaves out the second of two equal leaves, if a checkpoint has both.

    The map back writes one of them, as transformers does. `pairs`: the leaf to leave
    out -> the leaf to keep, and whether an untied model has both.
    """

    family: str
    pairs: Mapping[LeafPath, tuple[LeafPath, bool]]

    def __call__(self, table: LeafTable) -> LeafTable:
        for path, (kept, is_untied) in self.pairs.items():
            if path in table and kept in table:
                table = make_tie(re.escape(path), kept, _advice(path, is_untied))(table)
        return table

    def __str__(self) -> str:
        return call(f"maps.{self.family}.copies")

    def inverse(self) -> Transform:
        return self


def _advice(path: LeafPath, is_untied: bool) -> str:
    leave_out = f"leave {path} out: [{call('drop', re.escape(path))}, *map]."
    if not is_untied:
        return (
            f"The map has one leaf for both. Check which one is right, and {leave_out}"
        )
    return (
        "The config ties them. Keep both: pass the config with tie_word_embeddings:"
        f" False. Or {leave_out}"
    )


def _values(
    tensors: Sequence[Tensor], rows: Sequence[Row], sizes: Mapping[str, int]
) -> list[Transform]:
    """Returns the transforms of values, one for all leaves with the same change."""
    patterns: dict[tuple[float, float], list[str]] = {}
    for tensor, row in zip(tensors, rows, strict=True):
        factor = sizes[tensor.times] ** tensor.exponent if tensor.times else 1.0
        if tensor.factor_dtype is not None:
            factor = float(jnp.asarray(factor, tensor.factor_dtype))
        pattern = parse_name(row.target).pattern.pattern
        patterns.setdefault((factor, tensor.plus), []).append(pattern)
    changes: list[Transform] = []
    for (factor, number), listed in patterns.items():
        pattern = "|".join(listed)
        if factor != 1:
            changes.append(transforms.scale(pattern, factor))
        if number:
            changes.append(transforms.offset(pattern, number))
    return changes


def _short_config(config: Mapping[str, Any]) -> str:
    return str(config.get("_name_or_path") or config.get("model_type") or "config")
