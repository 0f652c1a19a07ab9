"""Completion of paths, steps, metrics and leaves in bash, zsh and fish.

Completion is silent: a path that cannot be read completes to nothing. Object stores are
not asked, because a request may take seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import click
from click.shell_completion import CompletionItem

from flaxckpt.cli import _step_names

Complete: TypeAlias = Callable[
    [click.Context, click.Parameter, str], list[CompletionItem]
]
"""Returns the completions of an incomplete word."""


def complete_path(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Lets the shell complete a file or a directory."""
    return [CompletionItem(incomplete, type="file")]


def complete_step(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes a step of the run, the newest first."""
    steps: list[int] = []
    path = _find_path(ctx, param.name or "")
    with contextlib.suppress(Exception):
        from flaxckpt import _inspect

        if path is not None:
            steps = _inspect.run_view.numbers(path, ctx.params.get("step_format"))
    names = ("latest", "best") if incomplete else ()
    return _matching([*map(str, reversed(steps)), *names], incomplete)


def complete_other(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes the other side of a comparison: a step of the run, or a path."""
    steps = complete_step(ctx, param, incomplete)
    return [*steps, *complete_path(ctx, param, incomplete)]


def complete_leaf(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes a leaf path, container by container."""
    leaves: Iterable[str] = ()
    path = _find_path(ctx)
    with contextlib.suppress(Exception):
        from flaxckpt._formats import locate

        if path is not None:
            form = ctx.params.get("step_format")
            words = (
                ctx.params.get("step"),
                _step_names.parse(ctx.params.get("first") or ""),
            )
            given = next((word for word in words if word is not None), None)
            step = None if given is None else _step_names.resolve(path, given, form)
            leaves = locate.read_metadata(path, step, step_format=form).leaves
    names = _children(leaves, incomplete)
    while len(names) == 1 and names[0].endswith("/"):  # the shell would add a space
        names = _children(leaves, names[0])
    return _matching(names, incomplete)


def complete_step_or_leaf(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    steps = complete_step(ctx, param, incomplete) if incomplete else []
    return [*complete_leaf(ctx, param, incomplete), *steps]


def complete_sort_key(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes a key of `ls --sort`: a column, or a metric of the newest step."""
    metrics: Iterable[str] = ()
    path = _find_path(ctx)
    with contextlib.suppress(Exception):
        from flaxckpt._formats import locate

        if path is not None:
            metrics = locate.read_metadata(path, None).metrics
    return _matching(["step", "saved", "size", *metrics], incomplete)


def _find_path(ctx: click.Context, name: str = "") -> str | None:
    """Returns the path on the command line that a parameter belongs to."""
    found = _step_names.find_path(ctx.params, name)
    if found is None and ctx.args:  # click stops at an option without its value
        first, second = (*ctx.args, None)[:2]
        found = _step_names.find_path({"path": first, "b": second}, name)
    return None if found is None or "://" in found else str(found)


def _children(leaves: Iterable[str], incomplete: str) -> list[str]:
    """Returns the paths one level below the last `/` that begin with `incomplete`."""
    start = incomplete.rfind("/") + 1
    paths: dict[str, None] = {}
    for leaf in leaves:
        if leaf.startswith(incomplete):
            name, slash, _ = leaf[start:].partition("/")
            paths[leaf[:start] + name + slash] = None
    return [*paths]


def _matching(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


_PATHS = (
    *("path", "a", "src", "dst", "target", "directory"),
    *("config", "output", "tokenizer"),
)
_STEPS = ("step", "steps", "step_a", "step_b", "more", "target_step")

COMPLETERS: Mapping[str, Complete] = {
    **dict.fromkeys(_PATHS, complete_path),
    **dict.fromkeys(_STEPS, complete_step),
    "b": complete_other,
    "first": complete_step_or_leaf,
    "leaf": complete_leaf,
    "sort": complete_sort_key,
}
"""Name of a parameter, which means the same in all verbs -> its completion."""
