"""The page's server: answers with a token only, and acts on a run only for its own page."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from zmqtrain.errors import ZmqTrainError
from zmqtrain.observe.dashboard.control import Control
from zmqtrain.observe.dashboard.follow import Followed, listed, seen
from zmqtrain.observe.run_directory import runs_of
from zmqtrain.strict_json import dumps

#: Seconds between two reads of a run that is being watched.
LOOK_S = 1.0
#: Looks without news after which something is sent nevertheless, so that a dead connection is noticed.
QUIET_LOOKS = 15
#: How many runs are kept in memory after they were last shown.
MOST_FOLLOWED = 8
_FILES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "uplot/uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uplot/uPlot.min.css": "text/css; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Dashboard:
    """The answers to the page's requests, about the runs of a folder."""

    def __init__(self, folder: Path, control: Control) -> None:
        self._folder, self._control = folder, control
        self._followed: dict[str, Followed] = {}

    async def index(self, request: Request) -> Response:
        """The page, and what belongs to it."""
        name = request.path_params.get("file", "index.html")
        if name not in _FILES:
            return PlainTextResponse("there is no such file", status_code=404)
        content = files("zmqtrain.observe.dashboard").joinpath("page", *name.split("/")).read_bytes()
        return Response(content, media_type=_FILES[name])

    async def runs(self, _request: Request) -> Response:
        """All runs, the newest first."""
        return _json(await run_in_threadpool(listed, self._folder, self._control.state))

    async def state(self, request: Request) -> Response:
        """All figures of a run, as far as they have been read."""
        run = self._find(request)
        return _missing(request) if run is None else _json(await run_in_threadpool(self._look, run))

    async def stream(self, request: Request) -> Response:
        """The figures of a run whenever they change, and its events, until it has ended."""
        run = self._find(request)
        if run is None:
            return _missing(request)
        after = request.headers.get("last-event-id", request.query_params.get("after", "0"))
        return StreamingResponse(self._news(run, int(after) if after.isdecimal() else 0), media_type="text/event-stream")

    async def _news(self, run: Followed, after: int) -> AsyncIterator[str]:
        shown: object = None
        quiet = 0
        while True:
            state = await run_in_threadpool(self._look, run)
            version = (run.version, state["status"].get("status"), state["reading"])
            if version != shown:
                shown, quiet = version, 0
                for item in run.feed(after):
                    after = item["n"]
                    yield f"id: {after}\nevent: feed\ndata: {_dump(item)}\n\n"
                yield f"event: state\ndata: {_dump(state)}\n\n"
            if state["status"].get("status") != "running" and not state["reading"]:
                yield "event: end\ndata: {}\n\n"
                return
            quiet += 1
            if quiet >= QUIET_LOOKS:
                quiet = 0
                yield ": still here\n\n"
            if not state["reading"]:
                await asyncio.sleep(LOOK_S)

    def _look(self, run: Followed) -> dict[str, Any]:
        return seen(run, self._control.state)

    async def log(self, request: Request) -> Response:
        """A part of a role's log."""
        run = self._find(request)
        if run is None:
            return _missing(request)
        start = request.query_params.get("from", "")
        role = request.path_params["role"]
        found = await run_in_threadpool(run.log, role, int(start) if start.isdecimal() else None)
        return _json(found) if found is not None else _json({"error": f"there is no log of {role}"}, 404)

    async def act(self, request: Request) -> Response:
        """Stop a run, have it keep a checkpoint, or have a host leave it."""
        if not _own_page(request):
            return _json({"error": "requests that change a run must come from this server's own page"}, 403)
        run = self._find(request)
        if run is None:
            return _missing(request)
        acts: dict[str, Callable[[Path], str]] = {
            "stop": self._control.stop,
            "checkpoint": self._control.checkpoint,
            "drain": lambda path: self._control.drain(path, request.query_params.get("host", "")),
        }
        try:
            return _json({"said": await run_in_threadpool(acts[request.path_params["action"]], run.path)})
        except ZmqTrainError as error:
            return _json({"error": str(error)}, 409)

    def _find(self, request: Request) -> Followed | None:
        name = request.path_params["run"]
        if name in self._followed:
            self._followed[name] = run = self._followed.pop(name)  # the newest last
            return run
        # Only names of runs that there are: nothing outside the folder can be asked for.
        path = next((path for path in runs_of(self._folder) if path.name == name), None)
        if path is None:
            return None
        self._followed[name] = run = Followed(path)
        while len(self._followed) > MOST_FOLLOWED:
            del self._followed[next(iter(self._followed))]
        return run


def make_app(folder: Path, control: Control, token: str, *, cookie: str = "zmqtrain") -> Starlette:
    """The server's application. ``cookie``: the name of the cookie that keeps the token; browsers share cookies between the ports
    of a host."""
    page = Dashboard(folder, control)
    run = "/api/runs/{run}"
    return Starlette(
        routes=[
            Route("/", page.index),
            Route("/static/{file:path}", page.index),
            Route("/api/runs", page.runs),
            Route(run, page.state),
            Route(f"{run}/stream", page.stream),
            Route(f"{run}/logs/{{role:path}}", page.log),
            Route(f"{run}/{{action}}", _only(("stop", "checkpoint", "drain"), page.act), methods=["POST"]),
        ],
        middleware=[Middleware(_Guard, token=token, cookie=cookie)],
    )


def _only(actions: tuple[str, ...], act: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def checked(request: Request) -> Response:
        if request.path_params["action"] not in actions:
            return _json({"error": "there is no such action"}, 404)
        return await act(request)

    return checked


class _Guard:
    """Lets only those in who have the token: in the address, once, and then in a cookie that scripts cannot read."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_header_list()]}
            await send(message)

        given = request.query_params.get("token")
        answer: ASGIApp = self._app
        if given is not None and self._is_token(given) and request.method == "GET":
            entered = RedirectResponse(request.url.path, status_code=303)
            entered.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            answer = entered
        elif not self._is_token(request.cookies.get(self._cookie, "")) and not self._is_token(_bearer(request)):
            text = "This page needs the token in the address that zmqtrain dashboard has printed: open that address again.\n"
            answer = PlainTextResponse(text, status_code=403)
        await answer(scope, receive, send_with_headers)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token if kind.lower() == "bearer" else ""


def _own_page(request: Request) -> bool:
    """Whether a browser sends the request for a page of this server, also through a tunnel from another port."""
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == request.headers.get("host")


def _header_list() -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in _HEADERS.items()]


def _missing(request: Request) -> Response:
    return _json({"error": f"there is no run {request.path_params['run']}"}, 404)


def _json(value: Any, status: int = 200) -> Response:
    return Response(_dump(value), status_code=status, media_type="application/json")


def _dump(value: Any) -> str:
    return dumps(value)
