"""Syntax trees of source text."""

import ast


def parse(text: str) -> ast.Module:
    """Returns the syntax tree of a text.

    In Python 3.11, threads that parse at the same time disturb each other, and a thread
    that logs a traceback parses the lines in it: Orbax has threads that time out.
    """
    for _ in range(5):
        try:
            return ast.parse(text)
        except SystemError:
            continue
    return ast.parse(text)
