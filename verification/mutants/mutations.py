"""The mutants of a module, without those that change only texts and types."""

import ast
import dataclasses
import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray import ast as parsing

from verification.mutants.operators import OPERATORS

Position = tuple[int, int]
"""Line from 1, column from 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one change.

    Attributes:
        name: The function and the change; unique in the module, and the same after
            changes elsewhere in it.
        lines: Lines that run if the change matters: those of the statement.
        source: The changed source.
    """

    name: str
    lines: range
    source: str


def find_mutants(source: str) -> list[Mutant]:
    """Returns the mutants of a module, in the order of its lines."""
    module = ast.parse(source)
    left_out = list(_left_out(module))
    found = []
    tree = parso.parse(source)
    pickled = pickle.dumps(tree)  # read again for each mutant: quicker than parsing
    for number, node in enumerate(parsing.ast_nodes(tree)):
        for operator in OPERATORS:
            places = list(OPERATORS[operator].mutation_positions(node))
            for index, (begin, _) in enumerate(places):
                if any(first <= begin < last for first, last in left_out):
                    continue
                if operator == "AddNot" and _is_inverted_by_others(node):
                    continue
                changed = _change_node(pickled, number, operator, index)
                if _compiles(changed):  # not so the `*` of parameters as a product
                    found.append((begin, _function(module, begin), changed))
    found.sort(key=lambda mutant: mutant[0])
    uses: Counter[str] = Counter()
    mutants = []
    for begin, function, changed in found:
        name = f"{function}: {_change(source, changed)}"
        uses[name] += 1
        if uses[name] > 1:
            name += f" (#{uses[name]})"
        mutants.append(Mutant(name, _statement_lines(module, begin[0]), changed))
    return mutants


def _change_node(pickled: bytes, number: int, operator: str, index: int) -> str:
    """Returns the source with a change of the node of this number."""
    tree = pickle.loads(pickled)
    node = next(itertools.islice(parsing.ast_nodes(tree), number, None))
    changed = OPERATORS[operator].mutate(node, index)
    if changed.type == "number":  # Cosmic Ray adds a space
        changed.prefix, changed.value = node.prefix, changed.value.strip()
    if changed is not node:
        siblings = node.parent.children
        siblings[[sibling is node for sibling in siblings].index(True)] = changed
    return str(tree.get_code())


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _is_inverted_by_others(node: Any) -> bool:
    """Returns True if the condition is a comparison or a `not`."""
    condition = node.children[2 if node.type == "test" else 1]
    return condition.type in ("comparison", "not_test")


def _left_out(module: ast.Module) -> Iterator[tuple[Position, Position]]:
    """Yields what is no behaviour, or only the choice of a number.

    These are annotations, aliases of types and imports for them, decorators, formatted
    texts, log calls and the constants of the module: times and limits.
    """
    for node in module.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield _extent(node)
    for node in ast.walk(module):
        match node:
            case ast.JoinedStr():
                yield _extent(node)
            case ast.AnnAssign(annotation=annotation):
                yield _extent(annotation)
            case ast.arg(annotation=ast.expr() as annotation):
                yield _extent(annotation)
            case ast.FunctionDef(returns=returns, decorator_list=decorators):
                yield from map(_extent, [*decorators, *([returns] if returns else [])])
            case ast.ClassDef(decorator_list=decorators):
                yield from map(_extent, decorators)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="_log" | "warnings"))):
                yield _extent(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield _extent(node)


def _extent(node: Any) -> tuple[Position, Position]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _function(module: ast.Module, begin: Position) -> str:
    names = [
        node.name
        for node in ast.walk(module)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and node.lineno <= begin[0] <= (node.end_lineno or 0)
    ]
    return ".".join(names) or "module"


def _statement_lines(module: ast.Module, line: int) -> range:
    """Returns the lines of the innermost statement around `line`, without its body.

    Defaults of arguments run with the function's body, and what runs at import with
    anything in the module.
    """
    lines, is_in_function = range(1, 1 << 20), False
    for node in ast.walk(module):  # outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            head_end = body[0].lineno - 1 if body else (node.end_lineno or 0)
            if isinstance(node, ast.FunctionDef):
                is_in_function = True
                lines = range(body[0].lineno, (node.end_lineno or 0) + 1)
            elif is_in_function and line <= max(head_end, node.lineno):
                lines = range(node.lineno, max(head_end, node.lineno) + 1)
    return lines


def _change(source: str, changed: str) -> str:
    """Returns the lines that differ, as one text each: `old -> new`."""
    old, new = source.splitlines(), changed.splitlines()
    while old and new and old[0] == new[0]:
        old, new = old[1:], new[1:]
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    before, after = (" ".join(map(str.strip, lines)) for lines in (old, new))
    return f"remove {before}" if after == "pass" else f"{before} -> {after}"
