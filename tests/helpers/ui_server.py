"""`flaxckpt ui` in another process, on a free port of this machine."""

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import threading
from urllib import parse

_START_SECS = 300
_END_SECS = 45
"""Less than the deadline of requests to a store, which the end must not wait for."""


class Served:
    """A server, with the address that it printed."""

    def __init__(self, process, address):
        self.process = process
        self.address = address
        self.host = parse.urlsplit(address).netloc
        self.token = parse.parse_qs(parse.urlsplit(address).query)["token"][0]
        self._cookie = None

    def url(self, path, **fields):
        query = f"?{parse.urlencode(fields)}" if fields else ""
        return f"http://{self.host}{path}{query}"

    @property
    def cookie(self):
        """The cookie for the token."""
        if self._cookie is None:
            reply = self.ask(f"/?token={self.token}", cookie=None)
            self._cookie = reply.headers["set-cookie"].partition(";")[0]
        return self._cookie

    def ask(self, path, *, method="GET", cookie="own", **headers):
        """Sends a request with the cookie, and returns the reply, read in full."""
        connection = http.client.HTTPConnection(self.host, timeout=60)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if cookie is not None:
            given["Cookie"] = self.cookie if cookie == "own" else cookie
        with contextlib.closing(connection):
            connection.request(method, path, headers=given)
            reply = connection.getresponse()
            reply.text = reply.read().decode()
            return reply


def send(served, path):
    """Sends a request on a socket of its own, and does not wait for the reply."""
    name, port = served.host.split(":")
    asked = socket.create_connection((name, int(port)), timeout=_START_SECS)
    lines = f"GET {path} HTTP/1.1", f"Host: {served.host}", f"Cookie: {served.cookie}"
    asked.sendall("\r\n".join([*lines, "", ""]).encode())
    return asked


@contextlib.contextmanager
def serving(*arguments):
    """Serves until the end of the block, and checks that Ctrl-C ended it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flaxckpt", "ui", "--no-browser", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    killer = threading.Timer(_START_SECS, process.kill)
    killer.start()
    try:
        address = process.stdout.readline().strip()
        killer.cancel()
        assert address.startswith("http://127.0.0.1:"), process.stderr.read()
        yield Served(process, address)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=_END_SECS)
        assert (process.returncode, err) == (0, ""), (process.returncode, err)
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
