"""Shows defaults and options in signatures of the reference, not private names."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import re
from collections.abc import Mapping
from typing import Any

import griffe

INTERNAL = re.compile(r"(?<![\w.])_\w|\._|^[a-z_]+\.[A-Z_]+$|^MappingProxyType")
MAX_CHARS = 60
"""Of a default that is shown."""


class PublicDefaults(griffe.Extension):
    """Replaces a default such as `_write.CONCURRENT_BYTES` by its value."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Changes the parameters of a function."""
        if func.name.startswith("_") and func.name != "__init__":
            return
        if any(str(p.annotation).startswith("Unpack[") for p in func.parameters):
            list_options(func)
        for parameter in func.parameters:
            parameter.default = public(parameter.default, func.module.path)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Changes a field of a dataclass, whose default is that of a parameter."""
        if attr.parent is not None and "dataclass" in attr.parent.labels:
            attr.value = public(attr.value, attr.module.path)


def list_options(func: griffe.Function) -> None:
    """Replaces `**options` by the options, as `inspect.signature` lists them."""
    module = importlib.import_module(func.module.path)
    name = func.path.removeprefix(f"{func.module.path}.")
    listed = inspect.signature(operator.attrgetter(name)(module)).parameters.values()
    del func.parameters["options"]
    for each in listed:
        if each.kind is not each.KEYWORD_ONLY or each.name in func.parameters:
            continue
        annotation = ast.parse(each.annotation, mode="eval").body
        func.parameters.add(
            griffe.Parameter(
                each.name,
                annotation=griffe.safe_get_annotation(annotation, func.parent),
                kind=griffe.ParameterKind.keyword_only,
                default=repr(each.default),
            )
        )


def public(default: Any, module: str) -> Any:
    """Returns the default, or its value if it is an expression with internal names."""
    if default is None or not INTERNAL.search(str(default)):
        return default
    value = eval(str(default), dict(vars(importlib.import_module(module))))
    shown = repr(dict(value) if isinstance(value, Mapping) else value)
    return "..." if "<" in shown or len(shown) > MAX_CHARS else shown
