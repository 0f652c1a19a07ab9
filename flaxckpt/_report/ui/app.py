"""The web application: addresses, threads, errors, and news as runs change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from flaxckpt import errors
from flaxckpt._report import assets, templates
from flaxckpt._report.ui import compare, frame, leaves, plan, runs, verify
from flaxckpt._report.ui.access import Guard
from flaxckpt._report.ui.workspace import Query, View, Workspace

_VIEWS: Mapping[str, View] = {
    "/": runs.page,
    "/runs": runs.table,
    "/run": runs.overview,
    "/run/sections": runs.sections,
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


def make_app(workspace: Workspace, *, token: str, port: int) -> ASGIApp:
    """Returns the application, behind its guard."""
    few, one = asyncio.Semaphore(_VIEWS_AT_ONCE), asyncio.Semaphore(1)
    routes = [
        Route(path, partial(_answer, workspace, view, turn))
        for views, turn in ((_VIEWS, few), (_READS, one))
        for path, view in views.items()
    ]
    routes.append(Route("/news", partial(_tell, workspace)))
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


# ---- news -------------------------------------------------------------------------


def _tell(workspace: Workspace, request: Request) -> Response:
    """Returns the last change of a run, or of all runs, for which pages ask."""
    try:
        latest = runs.news(workspace, Query(request.scope["query_string"]))
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
