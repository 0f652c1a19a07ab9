"""Shared setup: 8 CPU devices, a cache of programs, hypothesis without deadlines."""

import collections
import contextlib
import gc
import itertools
import os
import re
import signal
import sys
import threading
import time
from typing import Any

import hypothesis
import pytest

from tests import ROOT
from tests.helpers import run_guard

# Set before jax is imported; child processes inherit these variables.
_flags = re.sub(
    r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", "")
)
# Most tests run a program once, so that optimizing it takes longer than it saves.
_FEW_PASSES = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
_DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{_flags} {_FEW_PASSES} {_DEVICES}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_path = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([_path] if _path else [])])

import jax  # noqa: E402

# A later run, and another worker, loads what this one has compiled. Child processes do
# not: some are killed while they would write. What cannot be read is compiled again.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax-cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# The tests lower thousands of small programs, which nobody reads.
jax.config.update("jax_traceback_in_locations_limit", 0)


def _reuse_contexts() -> None:
    """Lets jax lower many programs in one MLIR context of each thread.

    It makes a new one for each program, which is a fifth of the time of the tests. A
    context keeps the constants of its programs, so it is replaced from time to time.
    """
    make = mlir.make_ir_context
    kept = threading.local()

    def make_or_reuse() -> Any:
        if getattr(kept, "uses", _USES) >= _USES:
            kept.context, kept.uses = make(), 0
        kept.uses += 1
        return kept.context

    mlir.make_ir_context = make_or_reuse


_USES = 200

with contextlib.suppress(ImportError):
    from jax._src.interpreters import mlir

    _reuse_contexts()

run_guard.start()

# A shell that starts the tests in the background ignores Ctrl-C in all its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Names each failure at once: a run that is ended early shows no summary."""
    plugins = session.config.pluginmanager
    if terminal := plugins.get_plugin("terminalreporter"):
        plugins.register(_Failures(terminal))


class _Failures:
    def __init__(self, terminal: pytest.TerminalReporter):
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.partition("\n")[0] if crash else ""
            self._terminal.write_line(f"\nFAILED {report.nodeid} {message}"[:300])


def pytest_collection_finish() -> None:
    """Takes all modules and tests out of the work of the garbage collector.

    Otherwise each full collection looks at millions of objects, for a second: more than
    half the time of many tests.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips the slow tests that would begin after SLOW_TESTS_END (Unix seconds)."""
    end = float(os.environ.get("SLOW_TESTS_END", "inf"))
    if item.get_closest_marker("slow") and time.time() > end:
        pytest.skip("the time for slow tests is over: SLOW_TESTS_END")


@pytest.hookimpl(tryfirst=True)  # before those with other marks are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_all_but_samples(items)
    _skip_gpu_tests(items)


def _mark_all_but_samples(items: list[pytest.Item]) -> None:
    """Marks the cases of tests that are `sampled(n)` as slow, but for one of `n`."""
    numbers: collections.Counter[str] = collections.Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            if numbers[test] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
            numbers[test] += 1


def _skip_gpu_tests(items: list[pytest.Item]) -> None:
    """Skips the tests that need a GPU, unless JAX_PLATFORMS names one.

    GPU_TESTS_ON=cpu runs them on a CPU device, which only tests the tests.
    """
    is_there = re.search("gpu|cuda|rocm", os.environ["JAX_PLATFORMS"])
    if not is_there and "GPU_TESTS_ON" not in os.environ:
        skip = pytest.mark.skip(reason="needs a GPU: set JAX_PLATFORMS=cuda,cpu")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def store_server(tmp_path_factory):
    """A function that returns the server of a kind, `moto` or `seaweed`."""
    from tests.helpers import store_servers

    with store_servers.all_ended():
        yield lambda kind: store_servers.running(kind, tmp_path_factory)


@pytest.fixture
def store_path(tmp_path_factory, store_server):
    """A function that returns a new path in a `file`, `memory`, `moto` or `seaweed`."""
    from flaxckpt import _storage

    # Separate, because a test may undo its own `monkeypatch`.
    environment = pytest.MonkeyPatch()

    def path(kind):
        if kind == "file":
            return tmp_path_factory.mktemp("run")
        name = f"{os.getpid()}-{next(_counter)}"
        if kind == "memory":
            return _storage.paths.resolve(f"memory://test/{name}")
        server = store_server(kind)
        for variable, value in server.environment.items():
            environment.setenv(variable, value)
        return _storage.paths.resolve(f"s3://{server.bucket}/{name}")

    yield path
    environment.undo()


_counter = itertools.count()


@pytest.fixture(autouse=True)
def _signals_are_put_back():
    """Removes the signal handlers of callbacks that a test has not closed."""
    yield
    if "flaxckpt._training.signals" in sys.modules:
        sys.modules["flaxckpt._training.signals"]._forget()
