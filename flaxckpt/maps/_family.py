"""Families of published models, each a table of its tensors for every target layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flaxckpt import errors, transforms
from flaxckpt._types import JSON, LeafPath
from flaxckpt.maps import _config
from flaxckpt.transforms import Row, Transform
from flaxckpt.transforms._base import call
from flaxckpt.transforms._form import Form
from flaxckpt.transforms._names import parse_name
from flaxckpt.transforms._remap import make_remap


class Tensor(NamedTuple):
    """A tensor of a family, or of all layers of it, and its place in a target layout.

    Attributes:
        source: Its name in a checkpoint of Hugging Face, with indices in braces.
        target: Its leaf path in the target layout.
        form: The axes of both, in einops notation; None if they are equal.
        when: The condition on the configuration under which there is such a tensor.
        optional: True if checkpoints may lack it, such as a head.
        times: The size whose power `exponent` the values are multiplied with.
        exponent: See `times`.
        plus: The target's values are greater by this number.
    """

    source: str
    target: str
    form: str | None = None
    when: str = ""
    optional: bool = False
    times: str | None = None
    exponent: float = 1
    plus: float = 0


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
        target_bases: Target layout -> the beginning that the base model has there.
    """

    name: str
    model_types: tuple[str, ...]
    base: str
    sizes: Mapping[str, str | int]
    tables: Mapping[str, Sequence[Tensor]]
    defaults: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    ignored: str = ""
    target_bases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def targets(self) -> tuple[str, ...]:
        """The target layouts."""
        return tuple(self.tables)

    def __call__(
        self,
        config: _config.Config,
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
            OptionError: The configuration is of another family or lacks a size, or
                there is no such target. When applied: tensors are missing, unknown, or
                do not fit.
        """
        if target not in self.tables:
            raise errors.OptionError(
                f"maps.{self.name} has no target {target!r:.80}; it has"
                f" {', '.join(self.tables)}"
            )
        content = self.check_config(config)
        rows = [t for t in self.tables[target] if _config.holds(content, t.when)]
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
        ignored = self.ignored or None
        remap = make_remap(listed, sizes, rest="error", ignored=ignored, name=name)
        return [remap, *_values(rows, listed, sizes)]

    def check_config(self, config: _config.Config) -> dict[str, Any]:
        """Returns a configuration as a dict, with the family's defaults.

        Raises:
            OptionError: The configuration is of another family.
        """
        content = _config.read_config(config)
        found = content.get("model_type")
        if found is not None and found not in self.model_types:
            raise errors.OptionError(
                f"the config is of a {found!r:.80}, wanted"
                f" {' or '.join(map(repr, self.model_types))}: maps.detect(source)"
                " finds the family"
            )
        return {**self.defaults, **content}

    def _sizes(
        self, config: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> dict[str, int]:
        """Returns the sizes that the tensors need."""
        needed = {t.times for t in tensors if t.times}
        for tensor in tensors:
            needed |= {*parse_name(tensor.source).axes, *parse_name(tensor.target).axes}
            if tensor.form is not None:
                needed |= Form.parse(tensor.form, {}).names
        sizes = {}
        for axis, rule in self.sizes.items():
            if axis not in needed:
                continue
            size = _config.find_size(config, rule)
            if size is None:
                raise errors.OptionError(
                    f"the config lacks {rule}, which maps.{self.name} needs; it has"
                    f" {errors.first_few(sorted(config), 8) or 'nothing'}"
                )
            sizes[axis] = size
        return sizes

    def _row(self, tensor: Tensor, bases: tuple[_Base, _Base], prefix: LeafPath) -> Row:
        source = bases[0].apply(tensor.source.replace(".", "/"))
        target = bases[1].apply(tensor.target)
        target = f"{prefix}/{target}" if prefix else target
        return Row(source, target, tensor.form, tensor.optional)


class _Base(NamedTuple):
    """The beginning of the base model's names, and what stands in its place."""

    old: str
    new: str | None

    def apply(self, name: str) -> str:
        if self.new is None or not self.old or not name.startswith(f"{self.old}/"):
            return name
        rest = name.removeprefix(f"{self.old}/")
        return f"{self.new}/{rest}" if self.new else rest


def _values(
    tensors: Sequence[Tensor], rows: Sequence[Row], sizes: Mapping[str, int]
) -> list[Transform]:
    """Returns the transforms of values, one for all leaves with the same change."""
    patterns: dict[tuple[float, float], list[str]] = {}
    for tensor, row in zip(tensors, rows, strict=True):
        factor = sizes[tensor.times] ** tensor.exponent if tensor.times else 1.0
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
