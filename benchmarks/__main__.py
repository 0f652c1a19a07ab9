"""Measures flaxckpt and other checkpointers, and reports which targets are met.

`docs/benchmarks.md` explains the cases and the method.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from rich.console import Console

from benchmarks import machine, report, samples, targets
from benchmarks.cases import CASES
from benchmarks.contenders import CONTENDERS
from benchmarks.samples import Sample, Settings, Skip

_DIRECTORY = Path("bench-results")
_NEEDED_BYTES = 12 * 10**9


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmarks."""
    options = _parser().parse_args(arguments)
    cases = options.only or list(CASES)
    console = Console()
    with _scratch(options.directory, quick=options.quick) as directory:
        settings = Settings(
            directory,
            options.rounds,
            options.quick,
            tuple(options.contenders or ()),
            options.platform,
        )
        host = machine.describe(directory)
        console.print(f"{host}\n{settings.rounds} rounds in {directory}")
        if host.filesystem == "tmpfs":
            console.print("[red]The directory is in memory: pass another --directory.")
        rows = list(_run(console, cases, settings))

    results = samples.collect(row for row in rows if isinstance(row, Sample))
    verdicts = targets.judge(
        results, (t for t in targets.TARGETS if t.measured.case in cases)
    )
    console.print(report.target_table(verdicts))
    if options.quick:
        console.print("The states were tiny: these ratios say nothing about speed.")
    skips = [row for row in rows if isinstance(row, Skip)]
    _write(report.to_json(results, verdicts, skips, host, settings), options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="use tiny states, to test the benchmarks")
    for name, metavar, choices in (
        ("--only", "CASE", CASES),
        ("--contenders", "NAME", CONTENDERS),
    ):
        names = ", ".join(repr(n) if " " in n else n for n in choices)
        add(name, nargs="+", choices=choices, metavar=metavar, help=names)
    add("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    add(
        "--directory",
        type=Path,
        default=_DIRECTORY,
        help=f"directory for temporary checkpoints (default: {_DIRECTORY})",
    )
    add(
        "--platform",
        default="gpu",
        help="platform of jax that the case gpu measures; cpu tests the case",
    )
    add("--json", type=Path, metavar="FILE", help="write the results")
    add("--picture", type=Path, metavar="FILE", help="draw a chart, as .svg or .png")
    return parser


@contextlib.contextmanager
def _scratch(directory: Path, *, quick: bool) -> Iterator[Path]:
    """A temporary directory to measure in."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < _NEEDED_BYTES and not quick:
        raise SystemExit(
            f"{directory.resolve()} has {report.quantity(free, 'bytes')} of free space,"
            f" needs {report.quantity(_NEEDED_BYTES, 'bytes')}: pass another"
            " --directory"
        )
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=directory) as scratch:
        yield Path(scratch).resolve()


def _run(
    console: Console, cases: Sequence[str], settings: Settings
) -> Iterator[Sample | Skip]:
    """Measures `cases` in order, and prints the table of each when it ends."""
    for case in cases:
        measured: list[Sample] = []
        # Also on a machine with a GPU, which only one case uses.
        with console.status(case) as status, jax.default_device(jax.devices("cpu")[0]):
            for row in CASES[case](settings):
                yield row
                if isinstance(row, Skip):
                    console.print(f"{case}: {row.what} skipped: {row.reason}")
                else:
                    measured.append(row)
                    status.update(f"{case}: {row.series.contender}")
        if measured:
            console.print(report.case_table(case, samples.collect(measured)))


def _write(data: dict[str, object], options: argparse.Namespace) -> None:
    for path in (options.json, options.picture):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.picture:
        from benchmarks import picture  # the only use of matplotlib

        picture.draw(data, options.picture)


if __name__ == "__main__":
    main()
