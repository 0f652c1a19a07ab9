"""Transforms between leaf paths and the names that Orbax gives to leaves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from flaxckpt import _state
from flaxckpt._state.boxes import JaxKey
from flaxckpt._state.leaf import Leaf, LeafTable, Role
from flaxckpt._transforms import base
from flaxckpt._transforms.base import NewLeaf, TableTransform, Transform
from flaxckpt._types import LeafPath

_Keys: TypeAlias = Sequence[JaxKey]


@dataclasses.dataclass(frozen=True)
class _AddFields(TableTransform):
    def __call__(self, table: LeafTable) -> LeafTable:
        keys = {
            path: _state.boxes.jax_keys(leaf.info)
            for path, leaf in table.items()
            if leaf.info.boxes
        }
        return _rename(table, keys, adds=True)

    def inverse(self) -> Transform:
        return _RemoveFields()

    def __str__(self) -> str:
        return base.call("use_orbax_names")


@dataclasses.dataclass(frozen=True)
class _RemoveFields(TableTransform):
    """The inverse of `use_orbax_names`; the boxes of the wanted state decide."""

    wanted: LeafTable = dataclasses.field(default_factory=dict)

    def with_wanted(self, wanted: LeafTable | None) -> Transform:
        return _RemoveFields(wanted or {})

    def __call__(self, table: LeafTable) -> LeafTable:
        boxed = {
            _state.boxes.jax_path(leaf.info): _state.boxes.jax_keys(leaf.info)
            for leaf in self.wanted.values()
            if leaf.info.boxes
        }
        fields = _lonely_fields(table)
        renamed = {}
        for path, leaf in table.items():
            if self._is_own_name(path, table):
                continue
            if path in boxed:
                is_field = [key.is_field for key in boxed[path]]
            else:
                containers = itertools.accumulate(path.split("/"), "{}/{}".format)
                is_field = [container in fields for container in containers]
            if any(is_field):
                pairs = zip(leaf.info.keys, is_field, strict=True)
                renamed[path] = [JaxKey(*pair) for pair in pairs]
        return _rename(table, renamed, adds=False)

    def _is_own_name(self, path: LeafPath, table: LeafTable) -> bool:
        """Returns True if a path is that of a wanted leaf, without fields.

        It may also be the name of another leaf with fields: parameters called `value`.
        """
        if path not in self.wanted:
            return False
        info = self.wanted[path].info
        return not info.boxes or _state.boxes.jax_path(info) not in table

    def inverse(self) -> Transform:
        return _AddFields()

    def __str__(self) -> str:
        return f"the inverse of {_AddFields()}"


def _lonely_fields(table: LeafTable) -> set[LeafPath]:
    """Returns the paths that end with `value` and have nothing beside them."""
    inside: dict[LeafPath, set[str]] = {}
    for path in table:
        for at in (path, *_state.tree.prefixes(path)):
            container, _, name = at.rpartition("/")
            if at:
                inside.setdefault(container, set()).add(name)
    return {
        f"{container}/{_state.boxes.FIELD}" if container else _state.boxes.FIELD
        for container, names in inside.items()
        if names == {_state.boxes.FIELD}
    }


def _rename(
    table: LeafTable, keys: Mapping[LeafPath, _Keys], *, adds: bool
) -> LeafTable:
    """Returns the table with the fields of boxes, in `keys`, added or removed."""
    rows = {}
    for path, named in keys.items():
        leaf = _renamed(table[path], named, adds=adds)
        rows[path] = [NewLeaf(path, leaf.info.path, leaf)]
    return base.assemble(table, set(rows), rows)


def _renamed(leaf: Leaf, named: _Keys, *, adds: bool) -> Leaf:
    new = tuple([key for key, is_field in named if adds or not is_field])
    role = leaf.info.role
    info = dataclasses.replace(
        leaf.info,
        path=_state.tree.join(new),
        keys=new,
        role=role and _renamed_role(role, leaf.info.path, named, adds=adds),
        boxes=(),
    )
    return dataclasses.replace(leaf, info=info)


def _renamed_role(role: Role, path: LeafPath, named: _Keys, *, adds: bool) -> Role:
    """Returns the role of the leaf at `path`, whose parameter has the same boxes."""
    optimizer = _translate(role.optimizer, named, adds=adds)
    param = role.param
    if path.endswith(f"/{param}"):
        param = _translate(param, named[::-1], adds=adds, is_reversed=True)
    return role._replace(optimizer=optimizer, param=param)


def _translate(
    part: LeafPath, named: _Keys, *, adds: bool, is_reversed: bool = False
) -> LeafPath:
    """Returns the new name of the start, or reversed the end, of a leaf path."""
    n_left = part.count("/") + 1 if part else 0
    keys = []
    for key, is_field in named:
        if n_left == 0:
            break
        n_left -= not (adds and is_field)
        if adds or not is_field:
            keys.append(key)
    return _state.tree.join(keys[::-1] if is_reversed else keys)


def use_orbax_names() -> TableTransform:
    """Names leaves as Orbax does, so that Orbax restores them into an `nnx.State`.

    ```python
    save("run/1", nnx.state(model), transforms=[use_orbax_names()])
    ```

    flaxckpt leaves NNX variables and linen's boxes, such as `nn.Partitioned`, out of
    leaf paths: `dense/kernel`. Orbax names their field: `dense/kernel/value`. This
    transform adds the field to leaves in variables and boxes, moments included. It
    applies to a state, and to a checkpoint of flaxckpt, which records them.

    flaxckpt restores both names, into variables and into plain arrays. `inverse`
    returns a transform that removes the fields, also from checkpoints of Orbax.

    Raises:
        OptionError: When applied: two leaves get the same path.
    """
    return _AddFields()
