"""Admits only the browser that holds the token.

Any page that the user visits can send requests to 127.0.0.1, and any program on the
machine can. So each request needs the token, first in the address and then as a cookie,
and comes from this server's own pages, as far as the browser says.
"""

from __future__ import annotations

import hmac
import secrets
from urllib import parse

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OWN_HOSTS = frozenset(("127.0.0.1", "localhost", "[::1]"))
"""With any port: the browser may see the server through a tunnel."""

_OWN_SITES = frozenset(("same-origin", "none"))

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""The content security policy: names in a page cannot run or load anything."""

_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_ADVICE = "Open the address that `flaxckpt ui` printed: it ends with a token."


class Guard:
    """An ASGI application that passes allowed requests to another, and no others.

    The port is in the name of the cookie: servers on other ports have other cookies.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"flaxckpt_ui_{port}"
        # Other servers on this host are sent the cookie, too, so it is not the token.
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._answer(scope)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> ASGIApp:
        """Returns the application that answers a request."""
        if scope["type"] != "http":
            return PlainTextResponse("only HTTP is served here", 400)
        headers = Headers(scope=scope)
        refusal = check_origin(scope["method"], headers)
        if refusal is not None:
            return refusal
        given = _token_in(scope["query_string"])
        if scope["path"] == "/" and given is not None:
            return self._enter(given)
        if not self._has_session(headers):
            return PlainTextResponse(_ADVICE, 401)
        return self._app

    def _enter(self, token: str) -> Response:
        """Exchanges the token for a cookie."""
        if not _are_equal(token, self._token):
            return PlainTextResponse(f"The token is wrong. {_ADVICE}", 401)
        response = RedirectResponse("/", 303)
        response.set_cookie(
            self._cookie, self._session, path="/", httponly=True, samesite="strict"
        )
        return response

    def _has_session(self, headers: Headers) -> bool:
        # Other programs at this address have cookies of any form, also of this name.
        pairs = ";".join(headers.getlist("cookie")).split(";")
        given = [pair.strip().partition("=") for pair in pairs]
        return any(
            name == self._cookie and _are_equal(value, self._session)
            for name, _, value in given
        )


def check_origin(method: str, headers: Headers) -> Response | None:
    """Returns the refusal of a request by its method and origin, or None."""
    if method not in ("GET", "HEAD"):
        return PlainTextResponse("this page only reads", 405)
    hosts = headers.getlist("host")
    if len(hosts) != 1 or _host_name(hosts[0]) not in _OWN_HOSTS:
        # Another name with this address: the site of that name would read our pages.
        return PlainTextResponse(
            "this server answers to 127.0.0.1 and localhost only", 421
        )
    origins = headers.getlist("origin")
    if any(origin != f"http://{hosts[0]}" for origin in origins):
        return PlainTextResponse("requests of other origins are refused", 403)
    sites = headers.getlist("sec-fetch-site")
    is_navigation = headers.get("sec-fetch-mode") == "navigate"
    is_foreign = any(site not in _OWN_SITES for site in sites)
    if is_foreign and not (is_navigation and headers.get("sec-fetch-dest") in _WINDOWS):
        return PlainTextResponse("requests of other sites are refused", 403)
    return None


_WINDOWS = frozenset((None, "document"))
"""A link from another site may open a page here, but no frame."""


def _host_name(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isascii() and port.isdigit() else host.lower()


def _token_in(query: bytes) -> str | None:
    try:
        fields = parse.parse_qs(query.decode("ascii"), max_num_fields=64)
    except ValueError:  # not ASCII, or too many fields
        return None
    return fields["token"][0] if "token" in fields else None


def _are_equal(given: str, wanted: str) -> bool:
    """Compares secrets in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
