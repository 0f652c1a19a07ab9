"""The web application: addresses, threads, errors, and events as runs change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp

from flaxckpt import errors
from flaxckpt._report import assets, templates
from flaxckpt._report.ui import compare, frame, leaves, overview, plan, runs, verify
from flaxckpt._report.ui.access import Guard
from flaxckpt._report.ui.feeds import News
from flaxckpt._report.ui.workspace import Query, View, Workspace

_VIEWS: Mapping[str, View] = {
    "/": runs.page,
    "/runs": runs.content,
    "/run": overview.page,
    "/run/sections": overview.sections,
    "/leaves": leaves.page,
    "/leaves/branch": leaves.branch,
    "/leaves/search": leaves.search,
    "/compare": compare.page,
    "/plan": plan.page,
    "/plan/result": plan.result,
    "/plan/suggest": plan.suggest,
    "/verify": verify.page,
    "/verify/start": verify.start,
    "/verify/status": verify.status,
    "/verify/stop": verify.stop,
}
"""Address -> its view. These read names, shapes and metrics."""

_READS: Mapping[str, View] = {
    "/leaves/leaf": leaves.statistics,
    "/compare/result": compare.result,
}
"""Address -> its view. These read the values of arrays, one request at a time."""

_VIEWS_AT_ONCE = 4

MOST_STREAMS = 24
"""Streams of events; the server has more connections, for pages to be opened."""

_NEWS_SECS = 0.25
_HEARTBEAT_SECS = 15.0
"""A comment tells whether the browser is still there."""


def make_app(workspace: Workspace, *, token: str, port: int) -> ASGIApp:
    """Returns the application, behind its guard.

    Args:
        workspace: The data behind the page.
        token: The secret in the address that is printed.
        port: The port of the server.
    """
    few, one = asyncio.Semaphore(_VIEWS_AT_ONCE), asyncio.Semaphore(1)
    routes = [
        Route(path, partial(_answer, workspace, view, turn))
        for views, turn in ((_VIEWS, few), (_READS, one))
        for path, view in views.items()
    ]
    streams = asyncio.Semaphore(MOST_STREAMS)
    routes.append(Route("/events", partial(_events, workspace, streams)))
    routes.append(Route("/news", partial(_poll, workspace)))
    routes += [
        Route(f"/static/{name}", partial(_send_file, *file))
        for name, file in _static_files().items()
    ]
    return Guard(Starlette(routes=routes), token=token, port=port)


# ---- views ------------------------------------------------------------------------


async def _answer(
    workspace: Workspace, view: View, turn: asyncio.Semaphore, request: Request
) -> Response:
    """Renders a view on a thread, after its turn has come."""
    async with turn:
        if await request.is_disconnected():  # while it waited
            return Response(status_code=499)
        return await run_in_threadpool(_render, workspace, view, request)


def _render(workspace: Workspace, view: View, request: Request) -> Response:
    try:
        content = view(workspace, Query(request.scope["query_string"]))
    except (errors.CheckpointError, OSError) as error:
        return _report_error(workspace, request, error)
    return HTMLResponse(_encode(content))


def _report_error(workspace: Workspace, request: Request, error: Exception) -> Response:
    text = str(error)
    if "hx-request" in request.headers:
        content = templates.render("ui/message.html", text=text, kind="error")
    else:
        content = frame.render("ui/page.html", workspace, None, error=text, view="")
    return HTMLResponse(_encode(content), status_code=_status(error))


def _status(error: Exception) -> int:
    if isinstance(error, errors.CheckpointNotFoundError):
        return 404
    return 400 if isinstance(error, errors.OptionError) else 500


def _encode(content: str) -> bytes:
    return content.encode(errors="backslashreplace")


# ---- events -----------------------------------------------------------------------


async def _events(
    workspace: Workspace, streams: asyncio.Semaphore, request: Request
) -> Response:
    """Sends an event each time a run has changed since the version that is shown.

    The page asks for `/news` instead if there are too many streams already.
    """
    try:
        query = Query(request.scope["query_string"])
        if name := query.text("run"):
            workspace.places.find(name)
    except errors.CheckpointError as error:
        return PlainTextResponse(str(error), _status(error))
    if streams.locked():
        return PlainTextResponse("too many pages are open: poll /news", 503)
    news = partial(run_in_threadpool, runs.news, workspace, query)
    return StreamingResponse(
        _stream(workspace, streams, news, query.text("version")),
        media_type="text/event-stream",
    )


async def _stream(
    workspace: Workspace,
    streams: asyncio.Semaphore,
    news: Callable[[], Awaitable[News]],
    seen: str,
) -> AsyncIterator[str]:
    quiet_secs = 0.0
    async with streams:
        while not workspace.feeds.is_closed:
            try:
                latest = await news()
            except errors.CheckpointNotFoundError:  # deleted: the page finds out
                return
            if latest.version != seen:
                seen, quiet_secs = latest.version, 0.0
                yield f"data: {json.dumps(latest._asdict())}\n\n"
            if quiet_secs >= _HEARTBEAT_SECS:
                quiet_secs = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(_NEWS_SECS)
            quiet_secs += _NEWS_SECS


async def _poll(workspace: Workspace, request: Request) -> Response:
    """Returns the last change of a run, or of all runs."""
    try:
        query = Query(request.scope["query_string"])
        latest = await run_in_threadpool(runs.news, workspace, query)
    except errors.CheckpointError as error:
        return PlainTextResponse(str(error), _status(error))
    return JSONResponse(latest._asdict())


# ---- files ------------------------------------------------------------------------


async def _send_file(content: bytes, media_type: str, request: Request) -> Response:
    return Response(content, media_type=media_type)


def _static_files() -> dict[str, tuple[bytes, str]]:
    """Returns the files that pages load, with their types: no path is ever opened."""
    script = "text/javascript"
    files = {name: (assets.read(name).encode(), script) for name in frame.SCRIPTS}
    style = assets.style() + assets.read("ui.css")
    return {
        **files,
        "report.js": (assets.script().encode(), script),
        frame.STYLE: (style.encode(), "text/css"),
    }
