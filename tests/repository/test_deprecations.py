"""A deprecation names its releases, and lasts as docs/stability.md promises."""

import ast
import re
import tomllib

import pytest

from tests import ROOT
from tests.helpers import syntax

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TEXT = re.compile(
    r"is deprecated since (?P<since>\d+\.\d+), and may go in (?P<goes>\d+\.\d+): \S"
)


def minor(version):
    """Returns (major, minor) of `0.2`, or of `0.2.1`."""
    return tuple(map(int, version.split(".")[:2]))


def find_fault(text):
    """Returns the fault in the text of a warning, or None."""
    found = TEXT.search(text)
    if found is None:
        return f"{text!r} does not say {TEXT.pattern!r}"
    since, goes = minor(found["since"]), minor(found["goes"])
    if since[0] == 0 and goes <= since:
        return f"{text!r} lasts for less than a minor release"
    if since[0] > 0 and goes[0] <= since[0]:
        return f"{text!r} goes in a minor release"
    if goes <= minor(VERSION):
        return f"{text!r} is due: remove it"
    return None


def warnings_in(source):
    """Yields the texts of the deprecation warnings of a module."""
    for node in ast.walk(syntax.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        names = [ast.unparse(arg) for arg in [*node.args, *map(value, node.keywords)]]
        if "DeprecationWarning" in names:
            parts = [n for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)]
            yield "".join(str(part.value) for part in parts)


def value(keyword):
    return keyword.value


def test_each_warning_names_its_releases():
    texts = [
        text
        for file in (ROOT / "flaxckpt").rglob("*.py")
        for text in warnings_in(file.read_text(encoding="utf-8"))
    ]
    assert not list(filter(None, map(find_fault, texts)))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a is deprecated since 0.2, and may go in 0.3: write b", None),
        ("a is deprecated since 1.1, and may go in 2.0: write b", None),
        ("a is deprecated: write b", "does not say"),
        ("a is deprecated since 0.2, and may go in 0.3: ", "does not say"),
        ("a is deprecated since 0.3, and may go in 0.3: write b", "less than a minor"),
        ("a is deprecated since 1.1, and may go in 1.2: write b", "in a minor release"),
        ("a is deprecated since 0.1, and may go in 0.2: write b", "is due"),
    ],
)
def test_finds_each_fault_in_deprecation_warnings(text, fault):
    code = f"warnings.warn({text!r}, DeprecationWarning, stacklevel=2)"
    [found] = map(find_fault, warnings_in(code))
    assert found is None if fault is None else fault in found
