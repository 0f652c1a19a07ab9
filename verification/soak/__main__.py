"""Runs the soak, and prints what grew."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from verification.soak import samples, work


def main():
    parser = argparse.ArgumentParser(prog="python -m verification soak")
    parser.add_argument("--saves", type=int, default=5000)
    parser.add_argument("--restores", type=int, default=500)
    parser.add_argument("--json", type=Path, help="a file for all samples")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result = work.soak(directory, options.saves, options.restores, say=_say)
    secs = time.monotonic() - start
    _say(f"{options.saves} saves, {result['read']} steps read, {secs:.0f} s")
    for who in ("writer", "reader"):
        if len(result[who]) > 4:
            for name in samples.GROWTH:
                grown = samples.growth(result[who], name)
                _say(f"{who}: {name} {result[who][-1][name]:.6g}, slope {grown:+.3g}")
    for problem in result["problems"]:
        _say(f"PROBLEM {problem}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 1 if result["problems"] else 0


def _say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
