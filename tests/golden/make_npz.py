"""Writes the golden archives of numpy, and what is in them.

Run from the root of the repository:

    python -m tests.golden.make_npz

What is in the repository was written with

    numpy 2.4.6    ml_dtypes 0.6.0

in the layout of big_vision: the names of leaves joined by `/`, optimizer state in the
lists of optax, moments in bfloat16, which numpy writes as two bytes without a type. A
folder is never written again. `expected.npz` is as in `make_legacy.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from tests.golden import make_legacy

ROOT: Final = Path(__file__).parent / "npz"

SAVE: Final[dict[str, Callable[..., None]]] = {
    "checkpoint.npz": np.savez,
    "checkpoint.npz-000000007": np.savez_compressed,
}


def state(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """The leaves of a checkpoint by their names."""
    params = {
        name: value
        for name, value in make_legacy.leaves(make_legacy.parameters(seed))
        if "embedding" not in name or seed == 1
    }
    moments = {name: value.astype(ml_dtypes.bfloat16) for name, value in params.items()}
    return {
        **{f"params/{name}": value for name, value in params.items()},
        "opt/0/0/count": np.array(seed, np.int32),
        **{f"opt/0/0/mu/{name}": value for name, value in moments.items()},
        "opt/1/scale": np.float64(0.5),
        "extra/accum_train_time": np.array([1.5, 2.5], ">f4"),
        "extra/mask": np.array([True, False, True]),
        "extra/transposed": np.asfortranarray(
            make_legacy.parameters(2)["decoder"]["logits"]["kernel"][:3, :4]
        ),
        "extra/none": np.zeros((0, 3), np.uint8),
        "extra/phases": np.array([1 + 2j, 3 - 4j], np.complex64),
    }


def write(path: Path, seed: int, expected: make_legacy.Expected) -> None:
    """Writes an archive, and notes what is in it."""
    with path.open("xb") as file:
        SAVE[path.name](file, **state(seed))
    for name, value in state(seed).items():
        array = np.asarray(value)
        make_legacy.expect(expected, path.name, name, array, array.dtype.name)


def main() -> None:
    """Writes what is not there yet."""
    if ROOT.exists():
        print(f"{ROOT} is there already")  # noqa: T201
        return
    ROOT.mkdir()
    expected: make_legacy.Expected = {}
    for seed, name in enumerate(SAVE, 1):
        write(ROOT / name, seed, expected)
    np.savez(ROOT / "expected.npz", **expected)


if __name__ == "__main__":
    main()
