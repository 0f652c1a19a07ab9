"""The operators of Cosmic Ray that make mutants, and three more in its terms."""

from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray import plugins
from cosmic_ray.operators.operator import Operator
from parso.python import tree

# One inverse and one shift for each kind of operator. The others fail in the same
# tests; `/` nearly always joins paths.
_OF_COSMIC_RAY = (
    "AddNot",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_BitAnd_BitOr",
    "ReplaceBinaryOperator_BitOr_BitAnd",
    "ReplaceBinaryOperator_FloorDiv_Mul",
    "ReplaceBinaryOperator_LShift_RShift",
    "ReplaceBinaryOperator_Mod_Add",
    "ReplaceBinaryOperator_Mul_Add",
    "ReplaceBinaryOperator_RShift_LShift",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBreakWithContinue",
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_GtE_Gt",
    "ReplaceComparisonOperator_GtE_Lt",
    "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_Gt_LtE",
    "ReplaceComparisonOperator_IsNot_Is",
    "ReplaceComparisonOperator_Is_IsNot",
    "ReplaceComparisonOperator_LtE_Gt",
    "ReplaceComparisonOperator_LtE_Lt",
    "ReplaceComparisonOperator_Lt_GtE",
    "ReplaceComparisonOperator_Lt_LtE",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceContinueWithBreak",
    "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
    "ZeroIterationForLoop",
)


class RemoveStatement(Operator):
    """Replaces a call, a `raise`, or a change of an attribute or item by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and _has_effect(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.children[0].get_first_leaf()
        node.children[0] = tree.Keyword("pass", first.start_pos, first.prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _has_effect(statement: Any) -> bool:
    if statement.type == "expr_stmt":
        target, sign = statement.children[:2]
        return target.type == "atom_expr" or getattr(sign, "value", "=") != "="
    is_call = statement.type == "atom_expr" and statement.children[-1].type == "trailer"
    return is_call or statement.type == "raise_stmt"


class InvertMembership(Operator):
    """Replaces `in` by `not in`, and the other way round."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "comparison" and _sign(node) in ("in", "not in"):
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        sign = "in" if _sign(node) == "not in" else "not in"
        node.children[1] = parso.parse(f" {sign}")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _sign(comparison: Any) -> str:
    return " ".join(comparison.children[1].get_code().split())


class CatchNothing(Operator):
    """Replaces a class in `except` or `contextlib.suppress` by one that nobody raises.

    Cosmic Ray's own fails on dotted names in tuples, and does not know `suppress`.
    """

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        for _, index, parent in _caught(node):
            yield parent.children[index].start_pos, parent.children[index].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        _, place, parent = _caught(node)[index]
        first = parent.children[place].get_first_leaf()
        name = tree.Name("StopAsyncIteration", first.start_pos, first.prefix)
        parent.children[place] = name
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _caught(node: Any) -> list[tuple[Any, int, Any]]:
    """Returns each class that `node` catches, with its index in its parent."""
    code = node.get_code(include_prefix=False) if node.type == "atom_expr" else ""
    if node.type == "except_clause":
        parent, index = node, 1
        if node.children[1].type == "atom":  # a tuple
            parent, index = node.children[1], 1
    elif code.startswith("contextlib.suppress("):
        parent, index = node.children[-1], 1
    else:
        return []
    if parent.children[index].type in ("testlist_comp", "arglist"):
        classes = parent.children[index].children
        return [(c, i, parent.children[index]) for i, c in enumerate(classes)][::2]
    return [(parent.children[index], index, parent)]


OPERATORS: dict[str, Operator] = {
    **{name: plugins.get_operator(f"core/{name}")() for name in _OF_COSMIC_RAY},
    "RemoveStatement": RemoveStatement(),
    "InvertMembership": InvertMembership(),
    "CatchNothing": CatchNothing(),
}
