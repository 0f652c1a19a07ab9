"""Compares flaxckpt with several releases of Orbax, each in its own environment.

    make test-orbax-versions
    python -m verification orbax_versions [--write] [--json FILE]

The make target installs the environments first. Exit status 1: values are wrong, or the
tables in docs/orbax.md differ from the findings; `--write` updates the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests import ROOT
from verification.orbax_versions import table

PAGE: Final = ROOT / "docs" / "orbax.md"
REQUIREMENTS: Final = Path(__file__).parent / "requirements"
PROCESSES: Final = 2
TIMEOUT_SECS: Final = 600


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verification orbax_versions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="update the page")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as directory:
        results = run(Path(directory))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    wrong = table.find_wrong(results)
    sys.stdout.writelines(f"{row}\n" for row in wrong)
    page = PAGE.read_text(encoding="utf-8")
    wanted = table.replace(page, table.render(read_requirements(), results))
    if options.write:
        PAGE.write_text(wanted, encoding="utf-8")
    elif page != wanted:
        sys.stdout.write(f"{PAGE} differs from the findings: pass --write\n")
        return 1
    return int(bool(wrong))


def releases() -> list[str]:
    """Returns the releases of Orbax, the oldest first."""
    names = [path.stem for path in REQUIREMENTS.glob("*.txt")]
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def interpreter(release: str) -> Path:
    return ROOT / f".venv-orbax-{release}" / "bin" / "python"


def read_requirements() -> dict[str, dict[str, str]]:
    """Returns release -> package -> version, with the month as `released`."""
    found: dict[str, dict[str, str]] = {}
    for release in releases():
        first, *lines = (REQUIREMENTS / f"{release}.txt").read_text().split("\n")
        pins = dict(line.split("==") for line in lines if line)
        found[release] = {"released": first.removeprefix("# released: ")} | pins
    return found


def run(directory: Path) -> dict[str, table.Results]:
    """Runs all releases, in temporary files below `directory`: release -> outcomes."""
    from verification.orbax_versions import flaxckpt_side

    flaxckpt_side.write(directory / "ours")
    with ThreadPoolExecutor(PROCESSES) as threads:
        found = threads.map(lambda name: run_release(name, directory), releases())
        results = dict(zip(releases(), found, strict=True))
    return {
        release: {
            **outcomes,
            "flaxckpt reads": flaxckpt_side.read(directory / release / "theirs"),
        }
        for release, outcomes in results.items()
    }


def run_release(release: str, directory: Path) -> Mapping[str, Any]:
    """Runs the script of a release, on a copy of flaxckpt's checkpoints."""
    ours, theirs = directory / release / "ours", directory / release / "theirs"
    shutil.copytree(directory / "ours", ours)
    theirs.mkdir()
    script = "verification.orbax_versions.orbax_side"
    ran = subprocess.run(
        [interpreter(release), "-m", script, ours, theirs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECS,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"Orbax {release} failed:\n{ran.stderr[-4000:]}")
    outcomes: Mapping[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
