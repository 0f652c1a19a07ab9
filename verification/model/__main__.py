"""Exhausts the models of the protocols, with up to three processes.

    python -m verification model [PROTOCOL ...]

Prints the number of states, and how each protocol breaks without each of its rules.
Exit status 1: a protocol is broken, and its shortest history is printed.
"""

import argparse
import sys
import time

from verification.model.cases import PROTOCOLS, exhaust_all, rules

PROCESSES = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verification model")
    parser.add_argument("protocols", nargs="*", metavar="|".join(PROTOCOLS))
    names = parser.parse_args().protocols or list(PROTOCOLS)
    is_broken = False
    for name in names:
        for processes in range(2, PROCESSES + 1):
            begin = time.process_time()
            states, found = exhaust_all(name, processes)
            secs = time.process_time() - begin
            tell(f"{name}: {processes} processes, {states:,} states, {secs:.1f} s")
            if found is not None:
                tell(f"{found}")
                is_broken = True
        for rule in rules(PROTOCOLS[name]):
            tell(f"  without {rule!r}: {breaks(name, rule) or 'nothing breaks'}")
    return int(is_broken)


def breaks(name: str, rule: str) -> str:
    """Returns what breaks without a rule, and after how many events."""
    for processes in range(2, PROCESSES + 1):
        found = exhaust_all(name, processes, (rule,)).counterexample
        if found is not None:
            return f"broken after {len(found.history)} events: {found.invariant}"
    return ""


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
