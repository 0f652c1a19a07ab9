"""Commands of click from the signatures of verbs.

A verb declares a parameter as `Annotated[type, Option(...)]` or `Annotated[type,
Argument(...)]`: the type says how to parse it.
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

import click

from flaxckpt import errors
from flaxckpt.cli import _completion, _step_names


class Argument:
    """Declares an argument; `is_step`: it is a step, and the verb gets its number."""

    min: float | None = None

    def __init__(self, metavar: str, help: str, *, is_step: bool = False) -> None:
        self.metavar = metavar
        self.help = help
        self.is_step = is_step


class Option:
    """Declares an option by its names: `--step`, `-s`; `--diff/--no-diff` is a flag.

    `metavar` is the value in the help, by default its type; `min` the smallest allowed
    number; `is_step` is as for `Argument`.
    """

    def __init__(
        self,
        *names: str,
        help: str,
        metavar: str | None = None,
        min: float | None = None,
        is_step: bool = False,
    ) -> None:
        self.names = names
        self.help = help
        self.metavar = "STEP" if is_step else metavar
        self.min = min
        self.is_step = is_step


def make_command(
    name: str, run: Callable[..., None], verb: Callable[..., int], help: str
) -> click.Command:
    hints = typing.get_type_hints(verb, include_extras=True)
    parameters = inspect.signature(verb).parameters.values()
    params = [_make(p.name, hints[p.name], p.default) for p in parameters]
    return _Command(name, callback=run, params=params, help=help)


def as_words(parameter: click.Parameter, value: object) -> list[str]:
    """Returns the words of a command line that give a parameter its value.

    No words give None, or the default of the parameter.
    """
    if value is None or value == parameter.default:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    if isinstance(parameter, click.Argument):
        return [str(each) for each in values]
    if value is True:
        return parameter.opts[:1]
    if value is False:
        return parameter.secondary_opts[:1]
    return [word for each in values for word in (parameter.opts[0], str(each))]


def _make(name: str, hint: Any, default: Any) -> click.Parameter:
    wanted, declared = typing.get_args(hint)
    is_required = default is inspect.Parameter.empty
    if typing.get_origin(wanted) in (types.UnionType, typing.Union):
        [wanted] = [arg for arg in typing.get_args(wanted) if arg is not type(None)]
    is_list = typing.get_origin(wanted) is list
    if is_list:
        [wanted] = typing.get_args(wanted)
    kind = _parser(wanted, declared.min)
    if declared.is_step:
        kind = _step_names.StepType()
    if isinstance(declared, Argument):
        metavar = f"{declared.metavar}{'...' if is_list else ''}"
        return _Argument(
            [name],
            meaning=declared.help,
            type=kind,
            nargs=-1 if is_list else 1,
            callback=_to_list if is_list else None,
            shell_complete=_completion.COMPLETERS.get(name),
            metavar=metavar if is_required else f"[{metavar}]",
            # A default, even None, would satisfy click for a required argument.
            **({"required": True} if is_required else {"default": default}),
        )
    return click.Option(
        [*declared.names, name],
        help=declared.help,
        type=None if wanted is bool else kind,
        is_flag=wanted is bool,
        multiple=is_list,
        callback=_to_list if is_list else None,
        shell_complete=_completion.COMPLETERS.get(name),
        default=() if is_list else default,
        metavar=declared.metavar,
        show_default=default not in (None, False),
    )


def _to_list(
    ctx: click.Context, param: click.Parameter, values: tuple[Any, ...]
) -> list[Any] | None:
    return list(values) or None


def _parser(wanted: Any, least: float | None) -> click.ParamType[Any]:
    if typing.get_origin(wanted) is Literal:
        return _Choice(typing.get_args(wanted))
    if wanted is int:
        return _Whole(min=int(least or 0))
    return _Number(min=least or 0.0) if wanted is float else click.STRING


class _Refusing(_step_names.ParamType):
    """A type whose values are `wanted`, which the message for another value says."""

    wanted: str
    words: Sequence[str] = ()

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            near = difflib.get_close_matches(str(value), self.words, n=1)
            advice = f": did you mean {near[0]}?" if near else ""
            self.fail(f"must be {self.wanted}, found {value!r}{advice}")


class _Choice(_Refusing, click.Choice[str]):
    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words)
        self.words, self.wanted = words, _join(words)


class _Whole(_Refusing, click.IntRange):
    def __init__(self, min: int) -> None:
        super().__init__(min)
        self.wanted = f"a whole number of at least {min}"


class _Number(_Refusing, click.FloatRange):
    def __init__(self, min: float) -> None:
        super().__init__(min)
        self.wanted = f"a number of at least {min:g}"


def _join(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


_GUESSED = {
    "--dtype": "--cast '.*=bfloat16'",
    "--exclude": "--drop",
    "--filter": "--only",
    "--include": "--only",
}
"""Option of other tools -> the option here."""


def _options(command: click.Command) -> set[str]:
    return {name for param in command.params for name in param.opts}


def describe_error(error: click.UsageError) -> str:
    """Returns what is wrong with a command line, and what to write instead."""
    told = error.format_message().rstrip(".")
    context = error.ctx
    if context is None:
        return f"{told[:1].lower()}{told[1:]}"
    path = context.command_path
    match error:
        case click.MissingParameter(param=_Argument() as param):
            usage = " ".join(context.command.collect_usage_pieces(context))
            meaning = f"{param.meaning[:1].lower()}{param.meaning[1:]}".rstrip(".")
            name = param.title
            return f"{name} is missing: write {path} {usage}\n{name} is {meaning}"
        case click.NoSuchOption():
            near = errors.first_few(sorted(error.possibilities or ()), 3)
            meant = _GUESSED.get(error.option_name, "")
            if meant.partition(" ")[0] in _options(context.command):
                near = meant
            advice = f"did you mean {near}?" if near else f"see {path} --help"
            return f"there is no option {error.option_name}: {advice}"
        case click.BadParameter(param=click.Parameter() as param):
            return f"{getattr(param, 'title', param.opts[0])} {error.message}"
    return f"{told[:1].lower()}{told[1:]}; see {path} --help"


class _Argument(click.Argument):
    def __init__(self, *args: Any, meaning: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meaning = meaning

    @property
    def title(self) -> str:
        """The name in the usage, without the brackets."""
        return (self.metavar or "").strip("[.]")


class _Command(click.Command):
    """A command whose help describes the arguments, before the options.

    A number too many is an error that names the option for it: steps are arguments of
    some commands only.
    """

    allow_extra_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments; raises UsageError if there are too many."""
        super().parse_args(ctx, args)
        if not ctx.args or ctx.resilient_parsing:
            return ctx.args
        arguments = [param for param in self.params if isinstance(param, _Argument)]
        taken = [param.title for param in arguments]
        # A step between two paths takes the place of the second one.
        values = [str(ctx.params.get(param.name or "")) for param in arguments[1:]]
        steps = [x for x in (*ctx.args, *values) if _step_names.parse(x) is not None]
        is_step = bool(steps) and len(ctx.args) == 1 and "--step" in _options(self)
        raise click.UsageError(
            f"{ctx.info_name} takes {', '.join(taken) or 'no argument'}, found"
            f" also {errors.first_few([*map(repr, ctx.args)], 3)}"
            + (f": for a step, write --step {steps[0]}" if is_step else ""),
            ctx,
        )

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        arguments = [param for param in self.params if isinstance(param, _Argument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(
                    [(param.make_metavar(ctx), param.meaning) for param in arguments]
                )
        super().format_options(ctx, formatter)
