"""Key-value store of short texts for all processes of a job, kept in files.

`_util.processes.Service` has the same interface on jax's coordination service.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote


class KeyValueStore(Protocol):
    """Key-value store of short texts, shared by all processes."""

    def set(self, key: str, text: str) -> None: ...

    def get(self, key: str, timeout_secs: float) -> str:
        """Waits for a text, or raises TimeoutError; with a timeout of 0, asks once."""
        ...

    def list(self, prefix: str) -> dict[str, str]:
        """Returns the texts below `prefix`: the rest of each key -> text."""
        ...

    def delete(self, prefix: str) -> None: ...


class FileStore:
    """Key-value store in files of a shared directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def set(self, key: str, text: str) -> None:
        """Sets or replaces a text atomically."""
        self._directory.mkdir(exist_ok=True)
        path = self._path(key)
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}~")
        new.write_text(text, encoding="utf-8")
        new.replace(path)

    def get(self, key: str, timeout_secs: float) -> str:
        """Polls for a text until the timeout, then raises TimeoutError."""
        deadline = time.monotonic() + timeout_secs
        pause = 0.002
        while True:
            with contextlib.suppress(FileNotFoundError):
                return self._path(key).read_text(encoding="utf-8")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(key)
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.1)

    def list(self, prefix: str) -> dict[str, str]:
        """Returns the texts below `prefix`: the rest of each key -> text."""
        texts = {}
        for name, key in self._below(prefix):
            with contextlib.suppress(FileNotFoundError):
                text = (self._directory / name).read_text(encoding="utf-8")
                texts[key.removeprefix(f"{prefix}/")] = text
        return texts

    def delete(self, prefix: str) -> None:
        for name, _ in self._below(prefix):
            (self._directory / name).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / quote(key, safe="")

    def _below(self, prefix: str) -> Iterator[tuple[str, str]]:
        try:
            names = os.listdir(self._directory)  # noqa: PTH208
        except FileNotFoundError:
            return
        for name in names:
            key = unquote(name)
            if key.startswith(f"{prefix}/") and not name.endswith("~"):
                yield name, key
