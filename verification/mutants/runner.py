"""Runs tests against mutants, in forks of a process that has imported jax.

The mutants are written to a copy of the tree, so that processes that tests start run
them, too. Nothing of the package itself is imported before a fork.
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests import ROOT
from tests.helpers import run_guard
from verification.mutants.mutations import Mutant

_WARM = (
    *("jax.numpy", "flax.linen", "flax.nnx", "optax", "tensorstore", "msgpack"),
    *("orbax.checkpoint", "hypothesis", "click", "rich.console", "ml_dtypes"),
    *("crc32c", "einops"),
)
"""What tests import, but for the package: a few seconds, once."""

_TESTS_SECS = 40.0
"""Seconds of the tests of a mutant, without the mutant: the slowest are left out."""

_CPU_SECS = 15
_WALL_SECS = 90.0
_PATIENCE = 5
"""A mutant has these seconds, and so many times those of its tests."""

_MEASURING_SECS = 600.0

_OPTIONS = (
    *("-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what is imported before
)


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """What a test needs and reaches.

    Attributes:
        secs: How long the test takes.
        lines: The lines that it runs in each module, by the module's path.
    """

    secs: float
    lines: dict[str, set[int]]


class Runner:
    """A copy of the tree, and forks that run tests in it.

    Args:
        directory: An empty directory for the copy.
    """

    def __init__(self, directory: Path) -> None:
        self._tree = directory / "tree"
        self._scratch = directory / "scratch"
        listing = [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "-z",
        ]
        names = subprocess.check_output(listing, cwd=ROOT, text=True).split("\0")
        for name in names:
            if (ROOT / name).is_file():
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._tree / name)
        os.environ["CI"] = "1"  # hypothesis draws the same examples each time
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # no threads before the forks
        os.environ["JAX_PLATFORMS"] = "cpu"
        for name in _WARM:
            importlib.import_module(name)
        gc.freeze()

    def measure(self, tests: str, modules: Iterable[str]) -> dict[str, Any]:
        """Runs tests without a mutant.

        Args:
            tests: A file of tests, or a test.
            modules: The modules whose lines count.

        Returns:
            Each test that passes -> its seconds, and module -> lines.
        """
        report = self._scratch / "reach.json"
        watched = [str(self._tree / module) for module in modules]

        def run() -> int:
            measure = _Measure(watched)
            code = pytest.main([*_OPTIONS, tests], plugins=[measure])
            report.write_text(json.dumps(measure.results(self._tree)))
            return int(code)

        self._run_in_fork(run, _MEASURING_SECS, writes_bytecode=True)
        if not report.exists():
            raise RuntimeError((self._scratch / "output").read_text())
        return dict(json.loads(report.read_text()))

    def check_unchanged(
        self, module: str, source: str, tests: dict[str, Reach]
    ) -> None:
        """Raises RuntimeError if tests fail without a mutant, in the order here."""
        outcome = self.run(module, Mutant("none", range(1 << 20), source), tests)
        if outcome != "survived":
            raise RuntimeError((self._scratch / "output").read_text())

    def run(self, module: str, mutant: Mutant, tests: dict[str, Reach]) -> str:
        """Returns "killed", "timeout", "survived", or "unreached" by all tests."""
        chosen = _choose(module, mutant, tests)
        if not chosen:
            return "unreached"
        secs = sum(tests[name].secs for name in chosen)
        file = self._tree / module
        original = file.read_bytes()
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()
        try:
            file.write_text(mutant.source)
            code = self._run_in_fork(
                lambda: pytest.main([*_OPTIONS, "-x", *chosen]),
                _WALL_SECS + _PATIENCE * secs,
                cpu_secs=_CPU_SECS + math.ceil(_PATIENCE * secs),
            )
        finally:
            file.write_bytes(original)
        if code in (None, -signal.SIGXCPU):
            return "timeout"
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise RuntimeError((self._scratch / "output").read_text())
        return "survived" if code == 0 else "killed"

    def _run_in_fork(
        self,
        action: Callable[[], int],
        secs: float,
        *,
        cpu_secs: int = -1,
        writes_bytecode: bool = False,
    ) -> int | None:
        """Returns the exit code, negative for a signal; None after `secs` seconds."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        mark = f"mutant-{os.getpid()}"
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_secs, -1))
            self._become_test_run(action, mark, writes_bytecode=writes_bytecode)
        end = time.monotonic() + secs
        while time.monotonic() < end:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.02)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = None
        variable = f"{run_guard.MARK}={mark}".encode()
        for process in run_guard.find_processes(variable):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _become_test_run(
        self, action: Callable[[], int], mark: str, *, writes_bytecode: bool
    ) -> None:
        """Runs `action` in the copy of the tree, and ends this process."""
        code = 1
        try:
            os.setsid()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            output = os.open(self._scratch / "output", flags, 0o666)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ[run_guard.MARK] = mark
            os.environ["TMPDIR"] = str(self._scratch)
            if not writes_bytecode:  # it would outlive the mutant
                sys.dont_write_bytecode = True
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            os.chdir(self._tree)
            sys.path.insert(0, str(self._tree))
            for name in [n for n in sys.modules if n.partition(".")[0] == "tests"]:
                del sys.modules[name]
            code = int(action())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _choose(module: str, mutant: Mutant, tests: dict[str, Reach]) -> list[str]:
    """Returns the tests that reach the mutant, the quickest first."""
    chosen: list[str] = []
    secs = 0.0
    for name, reach in sorted(tests.items(), key=lambda item: item[1].secs):
        if reach.lines.get(module, set()).isdisjoint(mutant.lines):
            continue
        secs += reach.secs
        if chosen and secs > _TESTS_SECS:
            break
        chosen.append(name)
    return chosen


class _Measure:
    """A plugin of pytest that notes the time and the lines of each test."""

    def __init__(self, files: list[str]) -> None:
        self._coverage = coverage.Coverage(data_file=None, include=files)
        self._secs: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_sessionstart(self) -> None:
        self._coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._coverage.switch_context(item.nodeid)
        begin = time.monotonic()
        yield
        self._secs[item.nodeid] = time.monotonic() - begin
        self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._failed.add(report.nodeid)

    def results(self, tree: Path) -> dict[str, tuple[float, dict[str, list[int]]]]:
        """Returns the seconds and the lines by module of each test that passed."""
        self._coverage.stop()
        data = self._coverage.get_data()
        results: dict[str, tuple[float, dict[str, list[int]]]] = {}
        for name in self._secs.keys() - self._failed:
            data.set_query_contexts([f"^{re.escape(name)}$"])
            lines = {
                str(Path(file).relative_to(tree)): found
                for file in data.measured_files()
                if (found := data.lines(file))
            }
            results[name] = self._secs[name], lines
        return results
