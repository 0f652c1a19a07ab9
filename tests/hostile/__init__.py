"""What cases are made of: each is a function that writes one under a directory."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, Final, ParamSpec

P = ParamSpec("P")

SPECIAL: Final[dict[str, Callable[[Path], object]]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "long file": lambda path: (path.touch(), os.truncate(path, 2**36)),
}
"""What may be in the place of a file, and must not be read."""


def later(
    write: Callable[Concatenate[Path, P], Path],
) -> Callable[P, Callable[[Path], Path]]:
    """Makes a function of a directory and more one of the rest; a case takes it."""

    @functools.wraps(write)
    def given(*args: P.args, **options: P.kwargs) -> Callable[[Path], Path]:
        return lambda root: write(root, *args, **options)

    return given
