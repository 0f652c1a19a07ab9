"""Loads in progress: a thread that reads, and the result or the error."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from flaxckpt import _doors, _state, _util, errors
from flaxckpt._types import PyTree


@_util.guessed_names.explain
class LoadHandle:
    """A load in progress. The program waits for the load at exit."""

    def __init__(
        self,
        read: Callable[[], object],
        compute: Callable[[], object],
        build: Callable[[], PyTree],
        counter: _util.progress.Counter,
    ) -> None:
        _doors.open_all()
        self._finish: Callable[[], PyTree] | None = lambda: (compute(), build())[1]
        self._counter = counter
        self._state: PyTree = None
        self._error: BaseException | None = None
        self._ended = _util.threads.Latch()
        self._finishing = threading.Lock()
        self._pid = os.getpid()
        context = _settings_of_this_thread()
        # No daemon thread: it may be in a library when Python ends.
        self._thread = threading.Thread(
            target=self._run, args=(read, context), name=counter.what, daemon=False
        )
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started
            self._run(read, context)

    def __repr__(self) -> str:
        if not self.done():
            return f"<{self._counter.what}: in progress>"
        return f"<{self._counter.what}: {'read' if self._error is None else 'failed'}>"

    def _run(
        self,
        read: Callable[[], object],
        context: contextlib.AbstractContextManager[None],
    ) -> None:
        try:
            with context:
                read()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        """Returns True if the reading has ended, with success or not."""
        return self._ended.is_set()

    def wait(self, timeout_secs: float | None = None) -> PyTree:
        """Waits until everything is read, and returns the same state at every call.

        Raises:
            CheckpointTimeoutError: The load is still reading after `timeout_secs`.
            CheckpointError: As for `load`.
        """
        _util.arguments.check_timeout(timeout_secs)
        if not self.done():
            self._check_process()
            with _util.progress.bar(self._counter):
                self._await_end(timeout_secs)
        if not self.done():
            raise errors.CheckpointTimeoutError(
                f"{self._counter.what} is not finished after {timeout_secs} s; call"
                " wait() again to wait longer"
            )
        if self._error is not None:
            raise self._error
        with self._finishing:
            if self._finish is not None:
                self._state = self._finish()
                self._finish = None
        return self._state

    def _await_end(self, timeout_secs: float | None) -> None:
        if not _util.threads.wait_for(self._ended, self._thread, timeout_secs):
            self._error = errors.OutOfMemoryError(
                f"{self._counter.what} ended before it began, as there was no memory"
                " for its thread: free memory, and load again"
            )
            self._ended.set()

    def _check_process(self) -> None:
        """Raises OptionError in a fork, where the reading thread does not exist."""
        if os.getpid() != self._pid:
            raise errors.OptionError(
                f"{self._counter.what} was started before this process was forked, and"
                " only the parent process finishes it: load in this process"
            )


@contextlib.contextmanager
def _with_settings(
    device: jax.Device | str | None, *, x64: bool, mesh: Mesh | None
) -> Iterator[None]:
    with jax.default_device(device), jax.enable_x64(x64), _state.meshes.use(mesh):
        yield


def _settings_of_this_thread() -> contextlib.AbstractContextManager[None]:
    """Returns a context with this thread's jax settings for placement and types."""
    config: Any = jax.config
    return _with_settings(
        config.jax_default_device,
        x64=config.jax_enable_x64,
        mesh=_state.meshes.current(),
    )
