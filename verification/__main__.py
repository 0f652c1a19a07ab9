"""Runs one of the searches: `python -m verification NAME [ARGUMENTS]`."""

import pkgutil
import runpy
import sys

import verification


def main():
    names = [m.name for m in pkgutil.iter_modules(verification.__path__) if m.ispkg]
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(
            f"usage: python -m verification {{{','.join(names)}}} [ARGUMENTS]\n"
            "verification/README.md says what each of them searches."
        )
    name = sys.argv.pop(1)
    runpy.run_module(f"verification.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
