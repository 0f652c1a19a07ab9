"""The processes of a job, their collectives, and jax's coordination service."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def process_index() -> int:
    return int(jax.process_index())


def process_count() -> int:
    return int(jax.process_count())


def own_address(network: str | None = None) -> str:
    """Returns this machine's address in `network`, `10.1.0.0/16`, or raises OSError."""
    if network is not None:
        wanted = ipaddress.ip_network(network)
        address = _address_towards(str(wanted[min(1, wanted.num_addresses - 1)]))
        if ipaddress.ip_address(address) not in wanted:
            raise OSError(f"this machine has no address in {network}, but {address}")
        return address
    try:
        from jax._src import distributed  # no public way to ask

        host = str(distributed.global_state.coordinator_address).rpartition(":")[0]
        found = _address_towards(host.strip("[]"))
        # A machine may know its own name, that of process 0, as a loopback address.
        return _address_towards("192.0.2.1") if _is_loopback(found) else found
    except (ImportError, AttributeError, OSError):
        return socket.gethostbyname(socket.gethostname())


def _address_towards(host: str) -> str:
    family, _, _, _, address = socket.getaddrinfo(host, 1)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address[:2])  # sends nothing
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def gather_flags(flags: Sequence[bool]) -> list[list[bool]]:
    """Returns the flags of every process; all call it at the same point."""
    if process_count() == 1:
        return [list(flags)]
    gathered = multihost_utils.process_allgather(np.array(flags, np.uint8))
    return [[bool(flag) for flag in row] for row in np.asarray(gathered)]


def has_preemption_service() -> bool:
    """Returns True if jax itself notifies all processes of preemptions."""
    try:
        from jax._src import distributed  # no public way to ask

        return distributed.global_state.preemption_sync_manager is not None
    except (ImportError, AttributeError):
        return False


def reached_preemption(step: int) -> bool:
    """Returns True if jax's preemption service asks all processes to save at `step`."""
    if not has_preemption_service():
        return False
    return bool(multihost_utils.reached_preemption_sync_point(step))


def broadcast_bytes(content: bytes) -> bytes:
    """Returns process 0's `content`; a collective, with equal lengths everywhere."""
    received = multihost_utils.broadcast_one_to_all(np.frombuffer(content, np.uint8))
    return bytes(np.asarray(received).astype(np.uint8))


# ---- jax's coordination service ----------------------------------------------------


class Service:
    """Short texts by key, shared by all processes through jax's coordination service.

    Any thread may use it while the devices train. ConnectionError means it has ended.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, text: str) -> None:
        with _jax_errors_as_oserror():
            self._client.key_value_set(key, text, allow_overwrite=True)

    def get(self, key: str, timeout_secs: float) -> str:
        """Returns a key's text, or raises TimeoutError; with 0 s, it asks once."""
        with _jax_errors_as_oserror():
            if not timeout_secs:
                return str(self._client.key_value_try_get(key))
            milliseconds = max(1, int(timeout_secs * 1000))
            return str(self._client.blocking_key_value_get(key, milliseconds))

    def list(self, prefix: str) -> dict[str, str]:
        """Returns all texts below `prefix`, by the rest of their keys."""
        with _jax_errors_as_oserror():
            rows = self._client.key_value_dir_get(f"{prefix}/")
        return {key.rpartition(f"{prefix}/")[2]: text for key, text in rows}

    def delete(self, prefix: str) -> None:
        """Deletes all texts below `prefix`."""
        with _jax_errors_as_oserror():
            self._client.key_value_delete(f"{prefix}/")


def service() -> Service | None:
    """Returns the coordination service; None if hidden in this version of jax."""
    try:
        from jax._src import distributed  # no public way to it

        client = distributed.global_state.client
    except (ImportError, AttributeError):
        return None
    names = ("set", "try_get", "dir_get", "delete")
    methods = ("blocking_key_value_get", *(f"key_value_{name}" for name in names))
    is_usable = all(hasattr(client, method) for method in methods)
    return Service(client) if is_usable else None


@contextlib.contextmanager
def _jax_errors_as_oserror() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = " ".join(str(error).split())
        if text.startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
            raise TimeoutError(text[:100]) from None
        raise ConnectionError(text[:200]) from None
