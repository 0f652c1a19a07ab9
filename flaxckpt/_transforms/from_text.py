"""Transforms from texts, as on the command line: `keep`, `drop`, `rename`, `cast`."""

from __future__ import annotations

from collections.abc import Iterable

from flaxckpt import errors
from flaxckpt._transforms.base import Transform
from flaxckpt._transforms.map_values import cast as make_cast
from flaxckpt._transforms.rename import drop as make_drop
from flaxckpt._transforms.rename import keep as make_keep
from flaxckpt._transforms.rename import rename as make_rename


def parse(
    *,
    only: Iterable[str] = (),
    drop: Iterable[str] = (),
    rename: Iterable[str] = (),
    cast: Iterable[str] = (),
    lossy_cast: Iterable[str] = (),
) -> list[Transform]:
    r"""Returns transforms in the order of the arguments.

    `rename` and `cast` have the forms `a/(.*)=b/\1` and `.*=bfloat16`.
    """
    transforms: list[Transform] = []
    if kept := [f"(?:{pattern})" for pattern in only]:
        transforms.append(make_keep("|".join(kept)))
    transforms += [make_drop(pattern) for pattern in drop]
    transforms += [make_rename(*_split("rename", "NAME", text)) for text in rename]
    for texts, lossy in ((cast, False), (lossy_cast, True)):
        casts = [_split("cast", "DTYPE", text) for text in texts]
        transforms += [make_cast(*found, lossy=lossy) for found in casts]
    return transforms


def _split(kind: str, value: str, text: str) -> tuple[str, str]:
    pattern, equals, found = text.rpartition("=")
    if not equals or not pattern:
        raise errors.OptionError(f"{kind} must be PATTERN={value}, found {text!r:.80}")
    return pattern, found
