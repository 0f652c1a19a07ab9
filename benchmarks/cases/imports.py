"""Seconds to import flaxckpt, and the packages that training programs import anyway."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from benchmarks import timing
from benchmarks.samples import Rows, Sample, Series, Settings, Skip

CASE = "imports"
_IMPORTS = {
    "flaxckpt": "import flaxckpt",
    "its dependencies": "import jax, flax, optax, tensorstore",
    "orbax": "import orbax.checkpoint",
}
_TIMES = 3
"""Imports are short and their times vary, so each round has three of each."""

_PROGRAM = """
import time
start = time.perf_counter()
{}
print(time.perf_counter() - start)
"""


def run(settings: Settings) -> Rows:
    """Measures each import in fresh processes."""
    names = list(_IMPORTS)
    if importlib.util.find_spec("orbax") is None:
        names.remove("orbax")
        yield Skip(CASE, "orbax", "orbax is not installed")
    for turn in timing.turns(names, _TIMES * settings.rounds):
        program = _PROGRAM.format(_IMPORTS[turn.contender])
        finished = subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        if turn.is_timed:
            series = Series(CASE, "import", turn.contender)
            yield Sample(series, float(finished.stdout))
