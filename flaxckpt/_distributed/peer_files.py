"""Files of a directory for the other processes of a job: a small server, and a client.

The server sends regular files below one directory, to those who know its token. It
lists nothing and changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import http.client
import http.server
import os
import re
import secrets
import socket
import socketserver
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flaxckpt import _storage

_SILENT_SECS = 30.0
"""Seconds without a byte after which a connection ends."""

_LEAST_BYTES_PER_SEC = 2**18
"""A slower peer counts as gone."""

_AT_ONCE = 2**20
_RANGE = re.compile(r"bytes=(\d{1,18})-")


class Peer(NamedTuple):
    """The server of a process.

    Attributes:
        host: Its name or address.
        port: Its port.
        token: The token for its files.
        certificate: The file of the certificate for TLS; None without TLS.
    """

    host: str
    port: int
    token: str
    certificate: str | None = None


@functools.lru_cache(maxsize=8)
def tls(certificate: str, *, is_server: bool) -> ssl.SSLContext:
    """Returns the settings of a connection whose ends both have the certificate.

    Args:
        certificate: A PEM file with a certificate and its private key.
        is_server: Whether this end is the server.

    Raises:
        OSError: The file is missing, or has no such content.
    """
    kind = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(kind)
    context.check_hostname = False  # the certificate tells who belongs to the job
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate)
    context.load_verify_locations(certificate)
    return context


class FileServer:
    """Serves the files of a directory until `close`.

    Args:
        root: The directory.
        host: The address on which it listens.
        certificate: The file of the certificate for TLS; None without TLS.
    """

    def __init__(self, root: Path, host: str, certificate: str | None = None) -> None:
        token = secrets.token_urlsafe(32)
        handler = type("Handler", (_Handler,), {"root": root, "token": token})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        settings = {"address_family": family, "certificate": certificate}
        self._server = type("Server", (_Server,), settings)((host, 0), handler)
        port = self._server.server_address[1]
        self.peer = Peer(host, port, token, certificate)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            name="flaxckpt peers",
            args=(0.5,),
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stops the server; requests in progress fail."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    # Not `http.server`'s, which asks for the name of the host, perhaps for long.
    daemon_threads = True
    request_queue_size = 128
    certificate: str | None

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.certificate is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_SILENT_SECS)
        settings = tls(self.certificate, is_server=True)
        with settings.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes is no error of ours."""


class _Handler(http.server.BaseHTTPRequestHandler):
    root: Path
    token: str
    protocol_version = "HTTP/1.1"
    timeout = _SILENT_SECS
    # Else a small file waits until the client confirms the header: up to 40 ms.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            self.send_error(403)
            return
        name = urllib.parse.unquote(self.path).lstrip("/")
        try:
            descriptor = self._open(name)
        except (OSError, ValueError):
            self.send_error(404)
            return
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            match = _RANGE.fullmatch(self.headers.get("Range", "bytes=0-"))
            start = min(int(match[1]), size) if match else 0
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            if size > start:
                self.connection.sendfile(file, start)

    def _open(self, name: str) -> int:
        parts = name.split("/")
        if "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(name)
        path = self.root.joinpath(*parts)
        if (
            os.path.realpath(path.parent)
            != os.path.join(  # noqa: PTH118
                os.path.realpath(self.root), *parts[:-1]
            )
        ):
            raise ValueError(name)  # a link out of the directory
        return _storage.files.open_regular_file(path, within=path.parent)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: a job reads thousands of files."""


class PeerConnection:
    """A connection to the server of another process.

    Args:
        peer: The server.
        silent_secs: Seconds without a byte after which it counts as gone.
    """

    def __init__(self, peer: Peer, silent_secs: float = _SILENT_SECS) -> None:
        self._peer = peer
        self._silent_secs = silent_secs
        self._http = http.client.HTTPConnection(
            peer.host, peer.port, timeout=silent_secs
        )
        if peer.certificate is not None:
            self._http = http.client.HTTPSConnection(
                peer.host,
                peer.port,
                timeout=silent_secs,
                context=tls(peer.certificate, is_server=False),
            )

    def __enter__(self) -> PeerConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def read(self, name: str, max_bytes: int) -> bytes:
        """Returns a small file.

        Raises:
            FileNotFoundError: The peer does not have it.
            OSError: The peer is gone, slow, or sends something else.
        """
        content = bytearray()
        with self._response(name, 0) as response:
            if response.length is None or response.length > max_bytes:
                raise OSError(f"{name} has more than {max_bytes} bytes")
            for part in self._receive(name, response, response.length):
                content += part
        return bytes(content)

    def copy(self, name: str, target: Path, size: int) -> Iterator[memoryview]:
        """Copies a file of `size` bytes, and yields its content.

        Goes on where an earlier copy has stopped.

        Raises:
            FileNotFoundError: The peer does not have it.
            OSError: The peer is gone, slow, or sends something else.
        """
        with target.open("a+b") as file:
            start = file.tell()
            file.seek(0)
            while part := file.read(_AT_ONCE):
                yield memoryview(part)
            with self._response(name, start) as response:
                left = size - start
                if response.length != left:
                    raise OSError(
                        f"{name} has {start + (response.length or 0)} bytes at the"
                        f" peer instead of {size}"
                    )
                for part in self._receive(name, response, left):
                    file.write(part)
                    yield memoryview(part)

    def _receive(
        self, name: str, response: http.client.HTTPResponse, size: int
    ) -> Iterator[bytes]:
        """Yields the content of a response, of `size` bytes, as it comes.

        Raises:
            OSError: The peer stops before, or is slow.
        """
        secs = self._silent_secs + size / _LEAST_BYTES_PER_SEC
        deadline = time.monotonic() + secs
        while size:
            part = response.read1(min(size, _AT_ONCE))  # what has come until now
            if not part:
                raise OSError(f"{name}: the peer has stopped sending")
            if time.monotonic() > deadline:
                raise OSError(f"{name}: the peer is too slow")
            size -= len(part)
            yield part

    @contextlib.contextmanager
    def _response(self, name: str, start: int) -> Iterator[http.client.HTTPResponse]:
        headers = {"Authorization": f"Bearer {self._peer.token}"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            self._http.request("GET", f"/{urllib.parse.quote(name)}", headers=headers)
            with self._http.getresponse() as response:
                if response.status == 404:
                    raise FileNotFoundError(f"{name} is not at the peer")
                if response.status != (206 if start else 200):
                    raise OSError(f"{name}: the peer answers {response.status}")
                yield response
        except http.client.HTTPException as error:
            self._http.close()
            raise OSError(f"{name}: the peer answers {error!r}") from None
        except OSError:
            self._http.close()  # the rest of the answer is of no use
            raise
