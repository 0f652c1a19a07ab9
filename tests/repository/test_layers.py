"""A package imports only from lower packages, through their doors."""

import ast
import functools
import graphlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ROOT
from tests.helpers import syntax

PACKAGE = ROOT / "flaxckpt"


def read_rows() -> list[set[str]]:
    """Returns the rows of the table of ARCHITECTURE.md, the lowest first.

    A package may import from lower rows only, never from its own. `flaxckpt/__init__`,
    which is not listed, may import all.
    """
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows: list[set[str]] = []
    for number, names in re.findall(r"^\| (\d* ?)\| (`[^|]*`) \|", text, re.MULTILINE):
        if number:
            rows.append(set())
            assert int(number) == len(rows)
        rows[-1] |= {*re.findall("`(\\w+)`", names)}
    return rows


ROWS = read_rows()
ROW = {name: row for row, names in enumerate(ROWS) for name in names}

# Third-party package -> the only modules or packages that may import it; none: nobody
# may. Under `if TYPE_CHECKING:` anything may be imported.
DOORS: dict[str, set[str]] = {
    "tensorstore": {
        "_storage.store_requests",
        "_storage.bucket",
        "_arrays",
        "_formats",
    },
    "flax": {"_state.flax_state", "partition._axis_names"},
    "optax": set(),
    "keras": {"integrations"},
    "tensorboard": {"integrations"},
    "yaml": {"configs._parsing"},
    "click": {"cli"},
    "jinja2": {"_report.templates"},
    "clu": {"integrations"},
    "grain": set(),
    "orbax": {"integrations"},
    "tensorflow": set(),
    "starlette": {"_report.ui"},
    "uvicorn": {"_report.ui"},
    "torch": set(),
}
PRIVATE_JAX_DOOR = "_util.processes"


@dataclass(frozen=True)
class Import:
    """An imported name, fully dotted, and its line."""

    name: str
    line: int
    for_types: bool = False


def module_name(file: Path) -> str:
    """`flaxckpt/_state/tree.py` -> `_state.tree`; a package is its folder."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}
INNER = sorted(MODULES.keys() - {""})


def imports(tree: ast.AST) -> Iterator[Import]:
    """Yields all imports of a module, also in functions and for type checking."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, for_types=id(node) in typing_only)


@functools.cache
def own_module(name: str) -> str | None:
    """`flaxckpt._state.tree.flatten` -> `_state.tree`; None: not a module of ours."""
    package, *parts = name.split(".")
    if package != "flaxckpt":
        return None
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def top(module: str) -> str:
    return module.partition(".")[0]


def import_is_fine(importer: str, imported: str) -> bool:
    """Returns True if the table allows module `importer` to import `imported`."""
    if imported == "":
        return False
    if top(importer) != top(imported):
        return ROW[top(imported)] < ROW[top(importer)]
    return True


@functools.cache
def parse(module: str) -> ast.Module:
    return syntax.parse(MODULES[module].read_text(encoding="utf-8"))


@functools.cache
def imported(module: str) -> tuple[Import, ...]:
    """What a module imports when it runs."""
    return tuple(found for found in imports(parse(module)) if not found.for_types)


def test_modules_import_only_from_lower_rows():
    lacking = {top(module) for module in INNER} - set(ROW)
    assert not lacking, f"{lacking} have no row in ROWS: give them one"
    wrong = [
        f"{module}, line {found.line}: {found.name}"
        for module in INNER
        for found in imported(module)
        if (own := own_module(found.name)) is not None
        and not import_is_fine(module, own)
    ]
    assert not wrong, "imports from its own row or above"


@pytest.mark.parametrize("package", sorted(ROW))
def test_packages_have_no_import_cycles(package):
    inside = [module for module in INNER if top(module) == package]
    graph = {
        module: {
            own
            for found in imported(module)
            if (own := own_module(found.name)) in inside
            and own != module
            # A package's __init__ is its door, not one of its modules.
            and MODULES[own].name != "__init__.py"
        }
        for module in inside
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())


@functools.cache
def handed_on(package: str) -> set[str]:
    """Returns `__all__` of a package, and the modules that its door imports for others.

    Those for itself alone are imported under a name with an underscore.
    """
    door = importlib.import_module(f"flaxckpt.{package}")
    return set(getattr(door, "__all__", ())) | {
        alias.name
        for node in ast.walk(parse(package))
        if isinstance(node, ast.ImportFrom) and node.module == f"flaxckpt.{package}"
        for alias in node.names
        if not (alias.asname or "").startswith("_")
    }


@functools.cache
def past_the_door(module: str, used: str) -> bool:
    """Returns True if `module` uses the module `used` past its package's door."""
    steps = used.split(".")
    # A public module hands on what the private package of its name holds.
    if top(used) in (top(module), f"_{module}"):
        return False
    packages = [".".join(steps[:depth]) for depth in range(1, len(steps))]
    return any(
        steps[depth] not in handed_on(package)
        for depth, package in enumerate(packages, start=1)
    )


def used(module: str) -> Iterator[Import]:
    """Yields what a module imports, and what it uses as attributes of `flaxckpt`."""
    yield from imported(module)
    roots = {
        alias.asname or alias.name
        for node in ast.walk(parse(module))
        if isinstance(node, ast.ImportFrom) and node.module == "flaxckpt"
        for alias in node.names
    }
    for found in attributes(parse(module)):
        if found.name.partition(".")[0] in roots:
            yield Import(f"flaxckpt.{found.name}", found.line)


def test_modules_use_only_names_exported_by_packages():
    wrong = [
        f"{module}, line {found.line}: {found.name}"
        for module in INNER
        for found in used(module)
        if (own := own_module(found.name)) and past_the_door(module, own)
    ]
    assert not wrong, "modules that their packages do not hand on"


def test_private_packages_export_few_modules():
    private = [name for name in ROW if name.startswith("_") and name in PACKAGES]
    counts = {name: len(handed_on(name)) for name in private}
    assert max(counts.values()) <= 16, counts


PACKAGES = {name for name, file in MODULES.items() if file.name == "__init__.py"}


def test_only_doors_import_heavy_packages():
    wrong = [
        f"{module}, line {found.line}: {found.name}"
        for module in MODULES
        for found in imported(module)
        if (doors := DOORS.get(top(found.name))) is not None
        and not any(f"{module}.".startswith(f"{door}.") for door in doors)
    ]
    assert not wrong, "modules that are no door to these packages"


def test_only_one_module_uses_private_jax():
    wrong = [
        f"{module}, line {found.line}: {found.name}"
        for module in MODULES
        if module != PRIVATE_JAX_DOOR
        for found in [*imports(parse(module)), *attributes(parse(module))]
        if is_private_jax(found.name)
    ]
    assert not wrong, "private parts of jax"


def attributes(tree: ast.AST) -> Iterator[Import]:
    """Yields dotted names in expressions: `jax._src.distributed`."""
    for node in ast.walk(tree):
        parts, at = [], node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if parts and isinstance(at, ast.Name):
            yield Import(".".join([at.id, *reversed(parts)]), node.lineno)


def is_private_jax(name: str) -> bool:
    package, *parts = name.split(".")
    return package == "jaxlib" or (
        package == "jax"
        and any(p.startswith("_") and not p.startswith("__") for p in parts)
    )


def test_rules_accept_and_reject_sample_imports():
    assert import_is_fine("_checkpoint.save", "_state.tree")
    assert import_is_fine("_formats.t5x", "_storage.files")
    assert import_is_fine("_state.tree", "_state.leaf")
    assert not import_is_fine("_state.tree", "_checkpoint.save")
    assert not import_is_fine("_steps.names", "_arrays.read")
    assert not import_is_fine("cli.show", "")
    assert past_the_door("_run.saving", "_checkpoint.match_optimizer")
    assert not past_the_door("_checkpoint.planner", "_checkpoint.match_optimizer")
    assert not past_the_door("_run.saving", "_checkpoint.save")
    assert is_private_jax("jax._src.distributed")
    assert is_private_jax("jaxlib.xla_client")
    assert not is_private_jax("jax.__version__")
    assert not is_private_jax("jax.experimental.multihost_utils")


def test_finds_imports_anywhere():
    tree = syntax.parse(
        "if TYPE_CHECKING:\n    import a\ndef f():\n    from b.c import d, e as g\n"
    )
    assert list(imports(tree)) == [
        Import("a", 2, for_types=True),
        Import("b.c.d", 4),
        Import("b.c.e", 4),
    ]


def test_each_package_has_one_row():
    assert sum(len(names) for names in ROWS) == len(ROW)
