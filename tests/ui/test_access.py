"""Only the browser with the token may ask, for pages of this server only."""

import re
import socket

import numpy as np
import pytest

import flaxckpt
from tests.helpers.ui_server import serving

pytest.importorskip("starlette", reason="starlette is missing")
pytest.importorskip("uvicorn", reason="uvicorn is missing")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("ui")
    (root / "secret.txt").write_text("secret")
    with flaxckpt.Checkpointer(root / "runs" / "one") as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(3, step)}, metrics={"loss": 1 / step})
    with serving(root / "runs") as server:
        yield server


def test_token_becomes_http_only_same_site_cookie(served):
    reply = served.ask(f"/?token={served.token}", cookie=None)
    assert (reply.status, reply.headers["location"]) == (303, "/")
    name, *attributes = reply.headers["set-cookie"].lower().split("; ")
    assert set(attributes) == {"httponly", "path=/", "samesite=strict"}
    assert served.token.lower() not in name
    assert name.startswith(f"flaxckpt_ui_{served.host.rpartition(':')[2]}=")
    assert served.ask("/").status == 200


@pytest.mark.slow
def test_token_is_long_and_unique(served, tmp_path):
    flaxckpt.save(tmp_path / "one", {"w": np.ones(2)})
    with serving(tmp_path / "one") as other:
        assert other.token != served.token
        assert min(len(other.token), len(served.token)) >= 40
        assert other.ask("/", cookie=served.cookie).status == 401


@pytest.mark.parametrize(
    "cookie", [None, "", "a=b", "flaxckpt_ui_1=x", "=;=", 'x="', "\x7f", "é=ü"]
)
@pytest.mark.parametrize(
    "path", ["/", "/run?run=one", "/news?run=one", "/static/ui.js"]
)
def test_shows_nothing_without_cookie(served, path, cookie):
    reply = served.ask(path, cookie=cookie)
    assert reply.status == 401
    assert "one" not in reply.text.replace("flaxckpt", "")


@pytest.mark.parametrize("token", ["", "x", "%C3%A9", "%ff", "a" * 5000])
def test_rejects_wrong_token(served, token):
    reply = served.ask(f"/?token={token}", cookie=None)
    assert reply.status == 401
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("path", ["/run?run=one&token=", "/leaves?token="])
def test_token_opens_only_first_page(served, path):
    assert served.ask(f"{path}{served.token}", cookie=None).status == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1234", 200),
        ("127.0.0.1:9", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("evil.example:80", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:80", 421),
        ("evil.example:127.0.0.1", 421),
        ("0.0.0.0", 421),
        ("", 421),
    ],
)
def test_rejects_other_hosts(served, host, status):
    assert served.ask("/run?run=one", Host=host).status == status
    if status != 200:
        entered = served.ask(f"/?token={served.token}", cookie=None, Host=host)
        assert entered.status == status


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost", "https://{host}", ""]
)
def test_rejects_other_origins(served, origin):
    reply = served.ask("/run?run=one", Origin=origin.format(host=served.host))
    assert reply.status == 403


def test_accepts_own_origin(served):
    assert served.ask("/run?run=one", Origin=f"http://{served.host}").status == 200


@pytest.mark.parametrize(
    ("site", "mode", "destination", "status"),
    [
        ("same-origin", "cors", "empty", 200),
        ("none", "navigate", "document", 200),
        ("cross-site", "navigate", "document", 200),  # a link: that site reads nothing
        ("cross-site", "no-cors", "script", 403),
        ("cross-site", "no-cors", "image", 403),
        ("cross-site", "navigate", "iframe", 403),
        ("same-site", "cors", "empty", 403),  # another port of this machine
        ("same-site", "navigate", "iframe", 403),
    ],
)
def test_rejects_requests_from_other_sites(served, site, mode, destination, status):
    headers = {
        "Sec_Fetch_Site": site,
        "Sec_Fetch_Mode": mode,
        "Sec_Fetch_Dest": destination,
    }
    assert served.ask("/run?run=one", **headers).status == status


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"]
)
def test_rejects_other_methods(served, method):
    assert served.ask("/run?run=one", method=method).status == 405


def test_every_response_has_strict_security_headers(served):
    for path in ("/", "/static/ui.js", "/nothing", "/run?run=nothing", "/news?run=no"):
        headers = served.ask(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/static/../access.py",
        "/static/..%2faccess.py",
        "/static/%2e%2e/access.py",
        "/static//etc/passwd",
        "/../secret.txt",
        "/run?run=../secret.txt",
        "/run?run=..",
        "/run?run=.",
        "/run?run=one/1",
        "/run?run=/etc",
        "/run?run=",
        "/leaves?run=one/../one",
        "/leaves?run=one%00",
        "/leaves/leaf?run=one&leaf=../../secret.txt",
        "/compare?run=one&with=../one",
        "/plan/result?run=one&into=/etc/passwd",
        "/plan/result?run=one&into=..",
    ],
)
def test_opens_only_existing_runs_and_leaves(served, path):
    reply = served.ask(path)
    assert reply.status == 404
    assert "root:" not in reply.text
    assert "Traceback" not in reply.text


@pytest.mark.parametrize(
    "path",
    [
        "/leaves?run=one&step=x",
        "/leaves?run=one&step=-1",
        f"/leaves?run=one&step={'9' * 5000}",
        "/leaves?run=%ff",
        f"/leaves?{'&'.join('a=1' for _ in range(100))}",
        "/compare/result?run=one&a=1&b=1",
    ],
)
def test_malformed_urls_return_bad_request(served, path):
    reply = served.ask(path)
    assert reply.status == 400
    assert "Traceback" not in reply.text


def raw(served, request):
    """Sends bytes and returns the first line of the answer."""
    name, port = served.host.split(":")
    with socket.create_connection((name, int(port)), timeout=30) as connection:
        connection.sendall(request)
        return connection.recv(100).partition(b"\r\n")[0]


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_rejects_odd_requests(served, request_):
    assert re.match(rb"HTTP/1.1 4\d\d |$", raw(served, request_))
    assert served.ask("/").status == 200


@pytest.mark.slow
def test_server_listens_only_on_this_machine(served):
    assert served.host.startswith("127.0.0.1:")
    port = int(served.host.rpartition(":")[2])
    with (
        socket.socket(socket.AF_INET6) as other,
        pytest.raises(OSError, match="refused"),
    ):
        other.connect(("::1", port))
