"""A module imports only from lower layers, and heavy packages have few doors."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flaxckpt"

# The layer table of ARCHITECTURE.md. A module may import from lower rows only, never
# from its own; packages stand for all modules in them. flaxckpt/__init__.py, which is
# not listed, may import all.
LAYERS = (
    {"errors", "_forks", "_types"},
    {"_arguments"},
    {"_connection"},
    {"_store"},
    {"_stores"},
    {"_remote"},
    {"_locks"},
    {
        "_access",
        "_dtypes",
        "_file_systems",
        "_chunks",
        "_collector",
        "_events",
        "_json",
        "_links",
        "_memory",
        "_multihost",
        "_parsing",
        "_texts",
        "_threads",
        "_triggers",
        "_wording",
        "_writers",
    },
    {"_marked", "_drawing"},
    {"_staging"},
    {
        "_beats",
        "_blocks",
        "_counters",
        "_notes",
        "_preemption",
        "_progress",
        "_runs",
        "_storage",
        "_tree",
        "_zarr",
    },
    {"_event_journal", "_ocdbt", "_renames", "_sinks", "_structure"},
    {"_info", "_journal", "_leases", "_stream", "_together"},
    {
        "_description",
        "_layout",
        "_containers",
        "_handle",
        "_unfinished",
        "_joint",
        "_marks",
        "_optimizer_states",
    },
    {"_snapshot", "_raw", "_spans", "_place", "_steps", "_survey"},
    {"_raw_chunks", "_regions"},
    {
        "_read",
        "_write",
        "_flax",
        "_optax",
        "_optimizer_roles",
        "policies",
        "_deletion",
        "datasets",
    },
    {"_classes", "_derive", "_object_graph", "formats"},
    {"_computed"},
    {"_pieces"},
    {"_locate"},
    {"transforms"},
    {
        "partition",
        "_plan",
        "_finder",
        "_fit",
        "_audit",
        "_belongings",
        "_findings",
        "_follow",
    },
    {"_afresh", "_planner", "_share", "_commit", "_file_checks"},
    {"_joint_save"},
    {"_save", "_restore", "_verify"},
    {"_targets", "_measured"},
    {"_changes", "_conversion", "_copies", "_inventory"},
    {"_convert", "_retention"},
    {"_uploads"},
    {"_tiers"},
    {"_run_steps"},
    {"_aside", "_directory", "_restores", "_sizes"},
    {"_saves"},
    {"_run_saver", "_card"},
    {"_checkpointer"},
    {"_beginning", "_held", "_preflight", "_resume", "_stopping"},
    {"_completed"},
    {"_hook"},
    {"_callback", "_diff", "_simulation", "_tools"},
    {"_keeping"},
    {"_listing", "_leaf_statistics", "_doctor", "_wanted"},
    {"_report"},
    {"configs"},
    {"cli", "integrations"},
    {"__main__"},
)
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names}

# Inside a package: its __init__ may import every sibling, and these siblings may be
# imported by the others. The readers of formats do not import each other.
SHARED_SIBLINGS = {
    "datasets._adapters",
    "datasets._buffered",
    "datasets._codec",
    "datasets._hints",
    "datasets._iterators",
    "datasets._kinds",
    "datasets._parts",
    "formats._manifest",
    "formats._ndarray",
    "formats._npz_members",
    "formats._orbax_arrays",
    "formats._orbax_disk",
    "formats._orbax_foreign",
    "formats._orbax_json",
    "formats._orbax_metrics",
    "formats._orbax_names",
    "formats._orbax_rows",
    "formats._safetensors_files",
    "formats._safetensors_json",
    "formats._safetensors_leaves",
    "formats._scan",
    "formats._signatures",
    "formats._zarr2",
    "formats._zarr_chunks",
    "formats._zarr_codecs",
    "transforms._factored",
    "transforms._mirrors",
    "transforms._parts",
    "transforms._patterns",
    "transforms._table",
    "transforms._values",
}
FREE_PACKAGES = {"_drawing", "_report", "cli"}

# Third-party package -> the only modules that may import it; none: nobody may.
# Types need no door: under `if TYPE_CHECKING:` anything may be imported.
DOORS: dict[str, set[str]] = {
    "tensorstore": {
        "_connection",
        "_store",
        "_ocdbt",
        "_raw",
        "_spans",
        "_read",
        "_write",
        "_pieces",
        "formats",
    },
    "flax": {"_flax"},
    "optax": {"_optax"},
    "keras": {"integrations"},
    "tensorboard": {"integrations"},
    "yaml": {"_parsing"},
    "typer": {"cli"},
    "clu": set(),
    "grain": set(),
    "orbax": set(),
    "tensorflow": set(),
    "torch": set(),
}
PRIVATE_JAX_DOOR = "_multihost"


@dataclass(frozen=True)
class Import:
    """One imported name, fully dotted, and where."""

    name: str
    line: int
    for_types: bool = False


def module_name(file: Path) -> str:
    """`flaxckpt/formats/_orbax.py` -> `formats._orbax`; a package is its folder."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}
INNER = sorted(MODULES.keys() - {""})


def imports(tree: ast.AST) -> Iterator[Import]:
    """All imports of a module, those in functions and for type checking included."""
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


def own_module(name: str) -> str | None:
    """`flaxckpt._tree.flatten` -> `_tree`; "" is flaxckpt itself; None: not ours."""
    package, *parts = name.split(".")
    if package != "flaxckpt":
        return None
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def top(module: str) -> str:
    return module.partition(".")[0]


def import_is_fine(importer: str, imported: str) -> bool:
    """Whether the layer table lets module `importer` import `imported`."""
    if imported == "":
        return False
    if top(importer) != top(imported):
        return LAYER[top(imported)] < LAYER[top(importer)]
    return (
        importer == top(importer)  # the package's __init__
        or imported in SHARED_SIBLINGS
        or (top(importer) in FREE_PACKAGES)
    )


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", INNER)
def test_a_module_imports_only_from_lower_layers(module):
    assert top(module) in LAYER, f"{module} has no row in LAYERS: give it one"
    wrong = [
        f"line {found.line}: {found.name}"
        for found in imports(parse(module))
        if (own := own_module(found.name)) is not None
        and not import_is_fine(module, own)
    ]
    assert not wrong, f"{module} imports from its own layer or above"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_heavy_packages_are_imported_through_their_doors(module):
    wrong = [
        f"line {found.line}: {found.name}"
        for found in imports(parse(module))
        if not found.for_types
        and (doors := DOORS.get(top(found.name))) is not None
        and top(module) not in doors
    ]
    assert not wrong, f"{module} is no door to these packages"


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {PRIVATE_JAX_DOOR}))
def test_only_multihost_reaches_into_private_jax(module):
    tree = parse(module)
    names = [*imports(tree), *attributes(tree)]
    wrong = [f"line {n.line}: {n.name}" for n in names if is_private_jax(n.name)]
    assert not wrong, f"{module} uses private parts of jax"


def attributes(tree: ast.AST) -> Iterator[Import]:
    """Dotted uses of a name: `jax._src.distributed` in an expression."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield Import(ast.unparse(node), node.lineno)


def is_private_jax(name: str) -> bool:
    package, *parts = name.split(".")
    return package == "jaxlib" or (
        package == "jax"
        and any(p.startswith("_") and not p.startswith("__") for p in parts)
    )


def test_formats_and_layers_are_told_apart():
    """The rules themselves, on modules that need not exist."""
    assert import_is_fine("_save", "_tree")
    assert import_is_fine("formats._t5x", "_storage")
    assert import_is_fine("formats", "formats._t5x")
    assert import_is_fine("formats._msgpack", "formats._ndarray")
    assert import_is_fine("_save", "formats._orbax")
    assert import_is_fine("cli.show", "cli._output")
    assert not import_is_fine("_tree", "_save")
    assert not import_is_fine("_save", "_restore")
    assert not import_is_fine("formats._t5x", "formats._msgpack")
    assert not import_is_fine("formats._t5x", "formats")
    assert not import_is_fine("formats._t5x", "partition")
    assert not import_is_fine("cli.show", "integrations.keras")
    assert not import_is_fine("_save", "")
    assert is_private_jax("jax._src.distributed")
    assert is_private_jax("jaxlib.xla_client")
    assert not is_private_jax("jax.__version__")
    assert not is_private_jax("jax.experimental.multihost_utils")


def test_imports_are_found_wherever_they_stand():
    tree = ast.parse(
        "if TYPE_CHECKING:\n    import a\ndef f():\n    from b.c import d, e as g\n"
    )
    assert list(imports(tree)) == [
        Import("a", 2, for_types=True),
        Import("b.c.d", 4),
        Import("b.c.e", 4),
    ]


def test_each_module_has_one_row():
    assert sum(len(names) for names in LAYERS) == len(LAYER)
