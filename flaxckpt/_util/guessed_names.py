"""Names that newcomers guess, from other libraries, with what to write instead.

The table is in `guessed_names.toml`, which is read after an error only.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from flaxckpt import errors
from flaxckpt._util import right_call

T = TypeVar("T", bound=Callable[..., Any])

CALL = "()"
"""The name in the table that stands for a call with wrong or missing arguments."""


@functools.cache
def read_answers() -> Mapping[str, Mapping[str, str]]:
    """Returns class, function or module -> guessed name -> what to write."""
    import importlib.resources
    import tomllib  # only after an error, like the table

    file = importlib.resources.files(__package__) / "guessed_names.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    groups, shared = table["names"], table["shared"]

    def names_of(names: Sequence[str]) -> Iterator[str]:
        for name in names:
            if name.startswith("+"):
                yield from names_of(groups[name[1:]])
            else:
                yield name

    def parse(answers: Mapping[str, Sequence[str]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for answer, names in answers.items():
            if answer == "use":
                for other in names:
                    found |= parse(shared[other])
                continue
            found |= dict.fromkeys(names_of(names), answer)
        return found

    return {place: parse(answers) for place, answers in table["answers"].items()}


# ---- the hook ------------------------------------------------------------------------

_SAID = "_said"
"""Attribute of an error with its message without the call to write."""

_CALLED = {"__init__": "", "__call__": "on_step"}
"""Method -> its name in a call, if that is another; the constructor is the class."""


def explain(target: T) -> T:
    """Makes errors about unknown or misplaced arguments and names say what to write.

    Of a class, it changes the constructor, the methods, and errors about attributes.
    """
    if not isinstance(target, type):
        name = target.__qualname__
        return _explain_arguments(target, name, name, is_method=False)
    name = target.__name__
    for method, function in [*vars(target).items()]:
        if inspect.isfunction(function) and (
            method in _CALLED or not method.startswith("_")
        ):
            place = name if method == "__init__" else f"{name}.{method}"
            called = _CALLED.get(method, method) or name
            explained = _explain_arguments(function, place, called, is_method=True)
            setattr(target, method, explained)
    target.__getattr__ = _getter(name)  # type: ignore[attr-defined]
    return target


def spell_out(options: type, source: Callable[..., Any]) -> Callable[[T], T]:
    """Lists options as parameters of functions that take them as `**options`.

    For `help`, `inspect.signature` and the errors of `explain`, which comes above.
    `options` is a `TypedDict`, and `source` a dataclass that has the options as fields,
    with their defaults.
    """
    types = options.__annotations__
    listed = [
        field.replace(annotation=getattr(types[name], "__forward_arg__", types[name]))
        for name, field in inspect.signature(source).parameters.items()
        if name in types
    ]

    def list_options(function: T) -> T:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        shown = signature.replace(parameters=[*own, *listed])
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return list_options


def _answers_of(place: str) -> Mapping[str, str]:
    """Returns the answers for a place; none if the table cannot be read."""
    try:
        return read_answers().get(place, {})
    except OSError:  # no more descriptors, for example
        return {}


def answer(place: str, name: str) -> str | None:
    return _answers_of(place).get(name)


def unknown_name(module: str, name: str, inner: str | None = None) -> AttributeError:
    """Returns the error for a name that a module lacks; `inner` may have it."""
    if (error := _answered(module, name)) is not None:
        return error
    if inner is not None:
        return errors.UnknownNameError(
            f"{module} has no {name}: write {module}.{inner}.{name}"
        )
    message = f"module {module!r} has no attribute {name!r}"
    return AttributeError(message, name=name)


def _answered(place: str, name: str) -> errors.UnknownNameError | None:
    """Returns an error, without the `name` that makes Python guess; None if unknown."""
    answer = _answers_of(place).get(name)
    if answer is None:
        return None
    return errors.UnknownNameError(f"{place} has no {name}: {answer}")


def _getter(place: str) -> Callable[[object, str], Any]:
    def get(self: object, name: str) -> Any:
        # A property of a subclass may have raised AttributeError.
        is_known = any(name in vars(cls) for cls in type(self).__mro__)
        if not is_known and (error := _answered(place, name)):
            raise error
        return object.__getattribute__(self, name)  # raises Python's own error

    return get


def _explain_arguments(function: T, place: str, called: str, *, is_method: bool) -> T:
    """Returns the function, with other errors about its arguments.

    `place` is its place in the table, and its name in errors; `called` is its name in a
    call. The first argument of a method is `self`.
    """
    spelled_out = getattr(function, "__signature__", None)
    known = spelled_out and spelled_out.parameters.keys()

    @functools.wraps(function)
    def explained(*args: Any, **options: Any) -> Any:
        try:
            if known and not options.keys() <= known:
                name = next(each for each in options if each not in known)
                what = f"got an unexpected keyword argument '{name}'"
                raise TypeError(f"{function.__qualname__}() {what}")
            return function(*args, **options)
        except errors.OptionError as error:
            # Of the calls inside of each other, the outermost is that of the user.
            said = getattr(error, _SAID, None)
            if said is None and isinstance(error, errors.ArgumentError):
                raise
            given = args[is_method:]
            meant = right_call.write_swapped(called, function, given, options)
            if meant is None and said is None:
                raise
            if meant is None:
                raise errors.OptionError(said) from None
            said = said or str(error)
            wrong = errors.ArgumentError(f"{said}: write {meant}")
            setattr(wrong, _SAID, said)
            raise wrong from None
        except TypeError as error:
            # Python has called the function if the traceback has another frame.
            traceback = error.__traceback__
            if traceback is None or traceback.tb_next is not None:
                raise
            given, message = args[is_method:], str(error)
            if "unexpected keyword" in message:
                advice = _advise_on_name(place, function, options, message)
            else:
                advice = _advise_on_call(place, called, function, given, options)
                advice = f"{message.replace('.__init__()', '()')}: {advice}"
            if advice is None:
                raise
            raise errors.ArgumentError(advice) from None

    return explained  # type: ignore[return-value]


def _advise_on_name(
    place: str, function: Callable[..., Any], options: Mapping[str, Any], message: str
) -> str | None:
    """Returns what to write instead of an unknown keyword, or None."""
    answers = _answers_of(place)
    name = next((name for name in options if f"argument '{name}'" in message), "")
    if name in answers:
        return f"{place} has no {name}: {answers[name]}"
    near = right_call.nearest(function, name)
    return near and f"{place} has no {name}: did you mean {near}=?"


_STEP_WORDS = ("best", "latest", "newest", "last")
"""Words for a step after a path, as the command line takes them."""


def _advise_on_call(
    place: str,
    called: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> str:
    """Returns the call to write instead of one with a wrong number of arguments."""
    answers = _answers_of(place)
    for word in args[1:]:
        if isinstance(word, str) and word in _STEP_WORDS and word in answers:
            return answers[word]
    if (example := answers.get(CALL)) is not None:
        return fill_in(example, [*args, *options.values()])
    return f"write {right_call.write(called, function, args, options)}"


def fill_in(answer: str, given: Sequence[object]) -> str:
    """Returns an answer, `write BestN(1, "loss", "min")`, with values of a call.

    A value takes the place of the first one of its type; `"min"` and `"max"` take the
    place of each other only.
    """
    try:
        call = ast.parse(answer.removeprefix("write "), mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.keywords
        values = [ast.literal_eval(arg) for arg in call.args]
    except (SyntaxError, ValueError, AssertionError):
        return answer
    left = [each for each in given if type(each) in (int, str)]
    for at, value in enumerate(values):
        alike = [
            each
            for each in left
            if type(each) is type(value)
            and (each in right_call.MODES) == (value in right_call.MODES)
        ]
        if alike:
            values[at] = alike[0]
            left.remove(alike[0])
    # In double quotes, as the table has them.
    texts = [json.dumps(v) if isinstance(v, str) else repr(v) for v in values]
    return f"write {ast.unparse(call.func)}({', '.join(texts)})"
