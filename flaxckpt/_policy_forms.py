"""How policies are written: in files, as options, in journals, and in tables of steps.

A policy is registered where it is defined, and all else follows from its fields: the
policy `BestN(1, "loss", "min")` is `{best = 1, metric = "loss", mode = "min"}` in a
file, and `best:1:loss:min` as an option.

The type of a field says how it is parsed: an `int` is at least 1, a `float` is seconds.
Reasons name the policy by its class and fields: `BestN(1, 'loss', 'min')`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=type[Any])


class PolicyForm(NamedTuple):
    """How a policy is written.

    Attributes:
        key: The key of its first field in a file.
        example: One as an option, such as `best:1:eval/loss:min`.
        shorten: Returns a policy in a few words.
        count_kept: Returns how many steps a policy keeps at most; None if the number
            has no limit.
    """

    cls: type[Any]
    key: str
    example: str
    shorten: Callable[[Any], str]
    count_kept: Callable[[Any], int] | None

    @property
    def option(self) -> str:
        return self.example.partition(":")[0]

    @property
    def fields(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.cls)]

    @property
    def types(self) -> list[Any]:
        return [*typing.get_type_hints(self.cls).values()]

    def to_dict(self, policy: Any) -> dict[str, Any]:
        values = {name: getattr(policy, name) for name in self.fields}
        return {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in values.items()
        }

    def to_text(self, policy: Any) -> str:
        """Returns a policy as reasons name it, such as `LatestN(3)`."""
        values = self.to_dict(policy).values()
        texts = (f"{v:g}" if isinstance(v, float) else repr(v) for v in values)
        return f"{self.cls.__name__}({', '.join(texts)})"

    def split(self, text: str) -> list[str]:
        """Returns the fields of a policy as an option; a metric may have colons.

        Raises ValueError if there are too few.
        """
        if len(self.fields) == 1:
            return [text]
        first, _, rest = text.partition(":")
        parts = [first, *rest.rsplit(":", len(self.fields) - 2)]
        if len(parts) != len(self.fields):
            raise ValueError(f"{text!r} lacks {self.fields[len(parts)]}")
        return parts


FORMS: dict[str, PolicyForm] = {}
"""Name of a policy's class -> how it is written."""


def register(
    key: str,
    example: str,
    shorten: Callable[[Any], str],
    *,
    count_kept: Callable[[Any], int] | None,
) -> Callable[[T], T]:
    """Returns a decorator that registers the class of a policy, and gives it `__str__`.

    See `PolicyForm` for the arguments.
    """

    def decorate(cls: T) -> T:
        form = FORMS[cls.__name__] = PolicyForm(cls, key, example, shorten, count_kept)
        described: Any = cls
        described.__str__ = lambda policy: form.to_text(policy)
        return cls

    return decorate


def find(policy: object) -> PolicyForm | None:
    """Returns how a policy is written; None if it is the user's own."""
    form = FORMS.get(type(policy).__name__)
    return form if form is not None and form.cls is type(policy) else None
