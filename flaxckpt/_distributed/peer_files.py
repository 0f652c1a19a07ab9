"""Files of a directory for the other processes of a job: a small server, and a client.

The server sends regular files below one directory, to those who know its token. It
lists nothing and changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import http.client
import http.server
import io
import json
import os
import re
import secrets
import socket
import socketserver
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxckpt import _storage

_SILENT_SECS = 30.0
"""Seconds without a byte after which a connection ends."""

_LEAST_BYTES_PER_SEC = 2**18
"""A slower peer counts as gone."""

_AT_ONCE = 2**20
_NAMES_AT_ONCE = 50
_SIZES = "File-Sizes"
_IDENTITIES = "File-Identities"
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

    `certificate` is a PEM file that also has its private key. Raises OSError if the
    file is missing, or has no such content.
    """
    kind = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(kind)
    context.check_hostname = False  # the certificate tells who belongs to the job
    # An authority may have signed it, whose own certificate is not in the file.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate)
    context.load_verify_locations(certificate)
    return context


def check_certificate(certificate: str) -> None:
    """Raises OSError if processes with the certificate could not connect.

    The certificate may have expired, for example, or be for servers only.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server, client = (
        tls(certificate, is_server=is_server) for is_server in (True, False)
    )
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in tuple(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)


def describe_certificate(certificate: str | None) -> str:
    """Returns a text that tells certificates apart, and says nothing of their keys."""
    if certificate is None:
        return "none"
    text = Path(certificate).read_text(encoding="ascii", errors="replace")
    found = re.findall("-----BEGIN CERTIFICATE-----[^-]*", text)
    digest = hashlib.sha256("".join("".join(found).split()).encode()).hexdigest()
    return f"one with the digest {digest[:16]}"


class FileServer:
    """Serves the files of a directory until `close`; by TLS with a `certificate`."""

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

    def do_HEAD(self) -> None:
        """Sends the identities of files: the same only for links to one file."""
        if not self._is_allowed():
            return
        found: list[str | None] = []
        for name in self._names():
            if (file := open_file(self.root, name)) is None:
                found.append(None)
                continue
            with file:
                status = os.fstat(file.fileno())
            found.append(str(_storage.files.identity(status)))
        self.send_response(200)
        self.send_header(_IDENTITIES, json.dumps(found))
        self.end_headers()

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return True
        self.send_error(403)
        return False

    def _names(self) -> Sequence[str]:
        _, _, query = self.path.partition("?")
        return urllib.parse.parse_qs(query, True).get("name", ())

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        path, _, query = self.path.partition("?")
        if query:
            self._send_files(self._names())
            return
        if (file := open_file(self.root, urllib.parse.unquote(path[1:]))) is None:
            self.send_error(404)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            match = _RANGE.fullmatch(self.headers.get("Range", "bytes=0-"))
            start = min(int(match[1]), size) if match else 0
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            if size > start:
                self.connection.sendfile(file, start)

    def _send_files(self, names: Sequence[str]) -> None:
        """Sends files one after the other; their sizes are in the header."""
        with contextlib.ExitStack() as opened:
            files = [open_file(self.root, name) for name in names]
            for each in filter(None, files):
                opened.enter_context(each)
            sizes = [
                None if each is None else os.fstat(each.fileno()).st_size
                for each in files
            ]
            self.send_response(200)
            self.send_header(_SIZES, json.dumps(sizes))
            self.send_header("Content-Length", str(sum(filter(None, sizes))))
            self.end_headers()
            for file, size in zip(files, sizes, strict=True):
                if file is not None and size:
                    self.connection.sendfile(file, 0, size)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: a job reads thousands of files."""


def open_file(root: Path, name: str) -> io.FileIO | None:
    """Opens a regular file below a directory; returns None for all others."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        return None
    path = root.joinpath(*parts)
    above = os.path.join(os.path.realpath(root), *parts[:-1])  # noqa: PTH118
    if os.path.realpath(path.parent) != above:  # a link out of the directory
        return None
    try:
        descriptor = _storage.files.open_regular_file(path, within=path.parent)
    except (OSError, ValueError):
        return None
    return os.fdopen(descriptor, "rb", buffering=0)


class PeerConnection:
    """A connection to a peer, which is gone after `silent_secs` without a byte."""

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

    def read(self, names: Iterable[str], max_bytes: int) -> dict[str, bytes]:
        """Returns those of the small files that the peer has: name -> content.

        Raises:
            OSError: The peer is gone, slow, or sends something else.
        """
        found: dict[str, bytes] = {}
        for query, some in _queries(names):
            with self._response(query, some[0], 0) as response:
                sizes = _read_sizes(response, some, max_bytes)
                content = bytearray()
                for part in self._receive(some[0], response, sum(sizes.values())):
                    content += part
            for name, size in sizes.items():
                found[name] = bytes(content[:size])
                del content[:size]
        return found

    def identify(self, names: Iterable[str]) -> dict[str, str]:
        """Returns those of the files that the peer has: name -> its identity there.

        Two names have the same identity if they are hard links to one file.

        Raises:
            OSError: The peer is gone, slow, or sends something else.
        """
        found: dict[str, str] = {}
        for query, some in _queries(names):
            with self._response(query, some[0], 0, method="HEAD") as response:
                found |= _read_header(response, _IDENTITIES, some)
        return found

    def copy(self, name: str, target: Path, size: int) -> Iterator[memoryview]:
        """Copies a file of `size` bytes, and yields its content.

        Each part that it yields is valid until the next. Goes on where an earlier copy
        has stopped.

        Raises:
            FileNotFoundError: The peer does not have it.
            OSError: The peer is gone, slow, or sends something else.
        """
        with target.open("a+b") as file:
            start = file.tell()
            file.seek(0)
            while begun := file.read(_AT_ONCE):
                yield memoryview(begun)
            with self._response(urllib.parse.quote(name), name, start) as response:
                left = size - start
                if response.length != left:
                    raise OSError(
                        f"{name} has {start + (response.length or 0)} bytes at the"
                        f" peer instead of {size}"
                    )
                for part in self._receive(name, response, left):
                    file.write(part)
                    yield part

    def _receive(
        self, name: str, response: http.client.HTTPResponse, size: int
    ) -> Iterator[memoryview]:
        """Yields the content of a response, of `size` bytes, as it comes.

        All parts are in one buffer: new memory for each would take as long as the copy.

        Raises:
            OSError: The peer stops before, or is slow.
        """
        secs = self._silent_secs + size / _LEAST_BYTES_PER_SEC
        deadline = time.monotonic() + secs
        buffer = memoryview(bytearray(min(size, _AT_ONCE)))
        while size:
            count = response.fp.readinto1(buffer[:size])  # what has come until now
            if not count:
                raise OSError(f"{name}: the peer has stopped sending")
            if time.monotonic() > deadline:
                raise OSError(f"{name}: the peer is too slow")
            size -= count
            yield buffer[:count]

    @contextlib.contextmanager
    def _response(
        self, url: str, name: str, start: int, *, method: str = "GET"
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"Authorization": f"Bearer {self._peer.token}"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            self._http.request(method, f"/{url}", headers=headers)
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


def _queries(names: Iterable[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields queries for a few names at a time, and these names."""
    rest = [*names]
    while rest:
        some, rest = rest[:_NAMES_AT_ONCE], rest[_NAMES_AT_ONCE:]
        yield "?" + urllib.parse.urlencode([("name", name) for name in some]), some


def _read_header(
    response: http.client.HTTPResponse, header: str, names: Sequence[str]
) -> dict[str, Any]:
    """Returns name -> value in a header with one value for each file that exists.

    Raises:
        OSError: It is not an answer to a request for these files.
    """
    try:
        values = json.loads(response.headers.get(header, ""))
        pairs = zip(names, values, strict=True)
        return {name: value for name, value in pairs if value is not None}
    except (ValueError, TypeError, RecursionError) as error:
        raise OSError(f"{names[0]}: the peer sends no {header}: {error}") from None


def _read_sizes(
    response: http.client.HTTPResponse, names: Sequence[str], max_bytes: int
) -> dict[str, int]:
    """Returns name -> size of the files in a response.

    Raises:
        OSError: It is not an answer to a request for these files, or one is too large.
    """
    try:
        values = _read_header(response, _SIZES, names)
        found = {name: int(size) for name, size in values.items()}
    except (ValueError, TypeError, OverflowError) as error:
        raise OSError(f"{names[0]}: the peer sends no sizes: {error}") from None
    for name, size in found.items():
        if not 0 <= size <= max_bytes:
            raise OSError(f"{name} has {size} bytes, and may have {max_bytes}")
    if response.length != sum(found.values()):
        raise OSError(
            f"{names[0]}: the peer sends {response.length} bytes instead of"
            f" {sum(found.values())}"
        )
    return found
