"""The options of transforms, of `convert` and `plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flaxckpt import errors
from flaxckpt.cli._parameters import Option

if TYPE_CHECKING:
    from flaxckpt.transforms import Transform

_Patterns = list[str] | None

OnlyOption = Annotated[
    _Patterns, Option("--only", metavar="PATTERN", help="Leaves to keep.")
]
DropOption = Annotated[
    _Patterns, Option("--drop", metavar="PATTERN", help="Leaves to drop.")
]
RenameOption = Annotated[
    _Patterns,
    Option("--rename", metavar="PATTERN=NAME", help=r"For example 'a/(.*)=b/\1'."),
]
CastOption = Annotated[
    _Patterns,
    Option("--cast", metavar="PATTERN=DTYPE", help="For example '.*=bfloat16'."),
]
LossyOption = Annotated[
    bool, Option("--lossy", help="Let --cast change integers, or make floats integers.")
]
MapOption = Annotated[
    str | None,
    Option("--map", metavar="NAME", help="Family of a published model, or auto."),
]


def parse(
    only: _Patterns, drop: _Patterns, rename: _Patterns, cast: _Patterns, *, lossy: bool
) -> list[Transform]:
    """Returns the transforms; raises OptionError for an invalid pattern or text."""
    from flaxckpt._transforms import from_text

    if lossy and not cast:
        raise errors.OptionError("--lossy has an effect only with --cast")
    return from_text.parse(
        only=only or (),
        drop=drop or (),
        rename=rename or (),
        **{"lossy_cast" if lossy else "cast": cast or ()},
    )
