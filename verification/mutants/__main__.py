"""Runs tests against mutants, and compares the survivors with the known ones.

    python -m verification mutants [--sample N] [--seed N] [--resume] [MODULE ...]

Without a module: all of them. The outcomes are in mutants-results; `--resume` repeats
only mutants that no test has killed, if their module is unchanged. Exit status 1: a
mutant survived that `survivors.toml` does not list, or it lists one that a test kills,
or that is no more.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from tests import ROOT
from verification.mutants.modules import MODULES
from verification.mutants.mutations import Mutant, find_mutants
from verification.mutants.runner import Reach, Runner

RESULTS = ROOT / "mutants-results"
SURVIVORS = Path(__file__).parent / "survivors.toml"

_KILLED = ("killed", "timeout")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verification mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--sample", type=int, help="at most so many of each module")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.modules) - set(MODULES):
        parser.error(f"unknown modules: {unknown}; there are {', '.join(MODULES)}")
    RESULTS.mkdir(exist_ok=True)
    rows, differences = [], 0
    with tempfile.TemporaryDirectory(prefix="flaxckpt-mutants-") as scratch:
        runner = Runner(Path(scratch))
        for module in options.modules or MODULES:
            source = (ROOT / "flaxckpt" / module).read_text()
            mutants = find_mutants(source)
            chosen = _sample(mutants, options.sample, options.seed)
            before = _known(module, source) if options.resume else {}
            outcomes = _run(runner, module, source, chosen, before)
            is_whole = len(chosen) == len(mutants)
            differences += _compare(module, outcomes, is_whole=is_whole)
            rows.append(_row(module, outcomes, len(mutants)))
            _tell(rows[-1])
    _tell("\n".join(["", *rows]))
    return int(differences > 0)


def _sample(mutants: list[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """Returns `count` of the mutants, in their order; all of them for None."""
    if count is None or count >= len(mutants):
        return mutants
    chosen = random.Random(seed).sample(range(len(mutants)), count)
    return [mutants[index] for index in sorted(chosen)]


def _run(
    runner: Runner,
    module: str,
    source: str,
    mutants: list[Mutant],
    before: dict[str, str],
) -> dict[str, str]:
    """Returns the outcome of each mutant by name."""
    tests = _reach(runner, module)
    runner.check_unchanged(f"flaxckpt/{module}", source, tests)
    outcomes = {}
    for mutant in mutants:
        outcome = before.get(mutant.name, "")
        if outcome not in _KILLED:
            begin = time.monotonic()
            outcome = runner.run(f"flaxckpt/{module}", mutant, tests)
            _tell(f"{outcome:9} {time.monotonic() - begin:5.1f} s  {mutant.name}")
        outcomes[mutant.name] = outcome
        row = {"digest": _digest(source), "outcomes": before | outcomes}
        _results(module).write_text(json.dumps(row, indent=1))
    return outcomes


def _known(module: str, source: str) -> dict[str, str]:
    """Returns the outcomes of the last run, if the module is unchanged since."""
    return _kept(_results(module), _digest(source)).get("outcomes", {})


def _reach(runner: Runner, module: str) -> dict[str, Reach]:
    """Returns the tests of a module by name, measured now or kept if unchanged."""
    modules = [f"flaxckpt/{name}" for name in MODULES]
    sources = "".join((ROOT / name).read_text() for name in modules)
    tests: dict[str, Reach] = {}
    for name in MODULES[module]:
        test_file = ROOT / "tests" / name.partition("::")[0]
        digest = _digest(test_file.read_text() + sources)
        results = _results(f"tests/{name}")
        row = _kept(results, digest)
        if not row:
            _tell(f"measuring {name}")
            row = {"digest": digest, "reach": runner.measure(f"tests/{name}", modules)}
            results.write_text(json.dumps(row))
        for test, (secs, lines) in row["reach"].items():
            tests[test] = Reach(secs, {file: {*found} for file, found in lines.items()})
    return tests


def _results(name: str) -> Path:
    return RESULTS / f"{name.replace('/', '.')}.json"


def _kept(results: Path, digest: str) -> dict[str, Any]:
    row = json.loads(results.read_text()) if results.exists() else {}
    return row if row.get("digest") == digest else {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _compare(module: str, outcomes: dict[str, str], *, is_whole: bool) -> int:
    """Returns the number of differences from `survivors.toml`, after telling them."""
    listed = tomllib.loads(SURVIVORS.read_text()).get(module, {})
    known = {name for names in listed.values() for name in names}
    survived = {name for name in outcomes if outcomes[name] not in _KILLED}
    old = known - survived
    if not is_whole:
        old &= outcomes.keys()
    for name in sorted(survived - known):
        _tell(f"not in survivors.toml: {name}")
    for name in sorted(old):
        _tell(f"in survivors.toml, but killed or gone: {name}")
    return len(survived - known) + len(old)


def _row(module: str, outcomes: dict[str, str], total: int) -> str:
    """Returns the module's row of the table in docs/reliability/measurements.md."""
    killed = sum(outcome in _KILLED for outcome in outcomes.values())
    count = f"{total}" if len(outcomes) == total else f"{len(outcomes)} of {total}"
    survived = len(outcomes) - killed
    score = 100 * killed / max(len(outcomes), 1)
    return f"| `{module}` | {count} | {killed} | {survived} | {score:.0f} % |"


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
