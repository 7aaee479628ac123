"""The page's server: the standard library's, on this machine's loopback address alone.

What models wrote is untrusted, and so is every other page in the browser. Texts leave as JSON and are put into the page
as text; the policy below lets the page run its own script and nothing else. A request that does not name this address
as its host is refused, so that a foreign page cannot read the log by pointing a name of its own at it (DNS rebinding).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from graftrl.errors import ConfigError, DataError, GraftrlError
from graftrl.viewer.index import EXCHANGES, REWARDS, Query
from graftrl.viewer.runs import PAGE, ViewedRun

ADDRESS = "127.0.0.1"
STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/view.js": ("view.js", "text/javascript; charset=utf-8"),
    "/view.css": ("view.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Parameters = Mapping[str, str]


class ViewServer(ThreadingHTTPServer):
    """Serves the page about some runs at `url`.

    Raises:
        ConfigError: the port is taken.
    """

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, runs: Sequence[ViewedRun], port: int = 0) -> None:
        """port: 0 takes a free one."""
        self.runs = list(runs)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port}: cannot be used ({error.strerror}); choose another or none") from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/"


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    server_version = "graftrl"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that an idle connection is kept

    def do_GET(self) -> None:
        hosts = {f"{name}:{self.server.port}" for name in (ADDRESS, "localhost")}
        if self.headers.get("Host") not in hosts:
            self._answer_json({"error": f"open {self.server.url} itself"}, HTTPStatus.FORBIDDEN)
            return
        address = urlsplit(self.path)
        if address.path in STATIC:
            name, kind = STATIC[address.path]
            self._answer((files("graftrl.viewer") / "static" / name).read_bytes(), kind)
        elif address.path in API:
            given = {name: values[-1] for name, values in parse_qs(address.query).items()}
            try:
                self._answer_json(API[address.path](self.server.runs, given))
            except GraftrlError as error:
                self._answer_json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        else:
            self._answer_json({"error": "no such page"}, HTTPStatus.NOT_FOUND)

    def _answer_json(self, content: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        text = json.dumps(content, allow_nan=False)
        self._answer(text.encode(), "application/json; charset=utf-8", status)

    def _answer(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:  # the browser asked for something else meanwhile
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


# What can be asked for ------------------------------------------------------------------------------------------------


def _runs(runs: Sequence[ViewedRun], given: Parameters) -> Any:
    return {"runs": [run.summary() for run in runs]}


def _prompts(runs: Sequence[ViewedRun], given: Parameters) -> Any:
    size = _number(given, "size", PAGE)
    return _run(runs, given).find(_query(given), max(0, _number(given, "page", 0)), max(1, min(size, 500)))


def _prompt(runs: Sequence[ViewedRun], given: Parameters) -> Any:
    run = _run(runs, given)
    step, prompt_id = _number(given, "step"), given.get("prompt", "")
    return {**run.prompt(step, prompt_id), "around": run.neighbours(_query(given), step, prompt_id)}


def _tokens(runs: Sequence[ViewedRun], given: Parameters) -> Any:
    run = _run(runs, given)
    return run.tokens(_number(given, "step"), given.get("prompt", ""), given.get("of", ""), _number(given, "index"))


API: dict[str, Callable[[Sequence[ViewedRun], Parameters], Any]] = {
    "/api/runs": _runs,
    "/api/prompts": _prompts,
    "/api/prompt": _prompt,
    "/api/tokens": _tokens,
}


def _run(runs: Sequence[ViewedRun], given: Parameters) -> ViewedRun:
    number = _number(given, "run", 0)
    if not 0 <= number < len(runs):
        raise DataError(f"run {number}: there are {len(runs)}, counted from 0")
    return runs[number]


def _query(given: Parameters) -> Query:
    return Query(
        first=_number(given, "first", None),
        last=_number(given, "last", None),
        model=given.get("model", ""),
        reward=_choice(given, "reward", REWARDS),
        low=_number(given, "low", None, float),
        high=_number(given, "high", None, float),
        exchange=_choice(given, "exchange", EXCHANGES),
        text=given.get("text", ""),
    )


def _choice(given: Parameters, name: str, known: Sequence[str]) -> str:
    value = given.get(name, "")
    if value not in known:
        raise DataError(f"{name} {value!r}: not one of {', '.join(filter(None, known))}")
    return value


_REQUIRED: Any = object()
_LARGEST = 2**31 - 1


def _number(given: Parameters, name: str, default: Any = _REQUIRED, kind: Callable[[str], Any] = int) -> Any:
    text = given.get(name, "")
    if not text and default is not _REQUIRED:
        return default
    try:
        value = kind(text)
    except ValueError as error:
        raise DataError(f"{name} {text!r}: not a number") from error
    if not abs(value) <= _LARGEST:
        raise DataError(f"{name} {text!r}: too large")
    return value
