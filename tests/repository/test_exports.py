"""The exports of `import flaxckpt`, their cost and their documentation."""

import ast
import dataclasses
import importlib
import inspect
import json
from collections.abc import Iterator
from types import ModuleType

import pytest

import flaxckpt
from tests.helpers import programs, syntax

# The core must not import these packages: it recognizes their objects by protocol.
NOT_IMPORTED = {"clu", "grain", "keras", "orbax", "tensorboard", "tensorflow", "torch"}

PROBE = """
import json, sys, warnings
warnings.simplefilter("error")
import flaxckpt
at_first = [*sys.modules]
from flaxckpt import *
found = {"dir": dir(flaxckpt), "at_first": at_first, "modules": [*sys.modules]}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, list[str]]:
    """Returns the state of a process that has imported only flaxckpt."""
    return json.loads(programs.run("-c", PROBE).stdout)


def test_all_lists_exactly_the_public_names(fresh):
    listed = [name for name in fresh["dir"] if not name.startswith("__")]
    assert sorted(flaxckpt.__all__) == listed
    assert all(hasattr(flaxckpt, name) for name in flaxckpt.__all__)


def test_type_checkers_see_all_lazily_imported_names():
    tree = syntax.parse(inspect.getsource(flaxckpt))
    [block] = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == sorted(flaxckpt.__all__)
    for name, home in seen.items():
        module = importlib.import_module(home)
        assert getattr(module, name) is getattr(flaxckpt, name)


def test_import_defers_jax(fresh):
    assert {"jax", "flax", "tensorstore", "click"}.isdisjoint(fresh["at_first"])


def test_missing_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'sav'"):
        _ = flaxckpt.sav


def test_import_loads_no_other_framework(fresh):
    assert NOT_IMPORTED.isdisjoint(fresh["modules"])


def test_import_is_light(fresh):
    """Each takes a tenth of a second, and few programs need them."""
    assert {"flax.nnx", "matplotlib", "click"}.isdisjoint(fresh["modules"])


def test_every_public_callable_has_a_docstring():
    missing = sorted(name for name, found in public_callables() if not has_doc(found))
    assert not missing


def test_method_names_contain_no_private_class():
    wrong = []
    for where, found in public_callables():
        if not inspect.isfunction(found) or "." not in where:
            continue
        cls = where.split(".")[-2]
        name = getattr(found, "__qualname__", "")
        if cls[:1].isupper() and not name.startswith(f"{cls}."):
            wrong.append(f"{where}: {name}")
    assert not wrong


def test_type_errors_name_public_class(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for call in (ckpt.best_step, ckpt.pin, ckpt.save, lambda: ckpt.prune(1)):
            with pytest.raises(TypeError, match=r"^Checkpointer\.\w+\(\) "):
                call()


def public_callables() -> Iterator[tuple[str, object]]:
    """Yields exported functions and classes, also of exported modules, and methods."""
    for name in flaxckpt.__all__:
        found = getattr(flaxckpt, name)
        members = own_members(found) if inspect.ismodule(found) else [(name, found)]
        for where, member in members:
            if callable(member):
                yield where, member
            if inspect.isclass(member):
                yield from methods(where, member)


def own_members(module: ModuleType) -> Iterator[tuple[str, object]]:
    for name, found in vars(module).items():
        if not name.startswith("_") and getattr(found, "__module__", None) == (
            module.__name__
        ):
            yield f"{module.__name__}.{name}", found


def methods(where: str, cls: type) -> Iterator[tuple[str, object]]:
    """Yields public methods and properties, except those that a protocol documents."""
    fields = {f.name for f in dataclasses.fields(cls)} if is_record(cls) else set()
    for name, found in members(cls).items():
        if name.startswith("_") or name in fields:
            continue
        if not inspect.isroutine(found) and not isinstance(found, property):
            continue
        if is_protocol(cls) or name not in protocol_methods(cls.__module__):
            yield f"{where}.{name}", getattr(cls, name)


def members(cls: type) -> dict[str, object]:
    """Returns the members of a class and of its bases in flaxckpt."""
    ours = [c for c in reversed(cls.__mro__) if c.__module__.startswith("flaxckpt.")]
    return {name: found for one in ours for name, found in vars(one).items()}


def is_record(cls: type) -> bool:
    return dataclasses.is_dataclass(cls)


def is_protocol(cls: object) -> bool:
    return bool(getattr(cls, "_is_protocol", False))


def protocol_methods(module_name: str) -> set[str]:
    """Returns the names in the protocols that a module defines or imports."""
    module = importlib.import_module(module_name)
    protocols = [found for found in vars(module).values() if is_protocol(found)]
    return {name for protocol in protocols for name in vars(protocol)}


def has_doc(found: object) -> bool:
    if inspect.isclass(found) and dataclasses.is_dataclass(found):
        # dataclass inserts the signature if there is no docstring.
        return bool(found.__doc__) and not found.__doc__.startswith(
            f"{found.__name__}("
        )
    return bool(inspect.getdoc(found))
