"""Runs histories from the command line."""

import argparse
import sys

from verification.simulation import runner


def main() -> None:
    """Runs the histories that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m verification simulation")
    parser.add_argument("--seeds", type=int, default=20_000, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", nargs="+", default=runner.KINDS)
    parser.add_argument("--trace", action="store_true", help="print the timelines")
    args = parser.parse_args()
    if args.trace:
        for kind in args.kinds:
            for seed in range(args.first, args.first + args.seeds):
                runner.print_timeline(kind, seed)
        return
    violations = [
        runner.run(kind, args.first, -(-args.seeds // runner.SLOWNESS.get(kind, 1)))
        for kind in args.kinds
    ]
    sys.exit(1 if any(violations) else 0)


if __name__ == "__main__":
    main()
