"""An S3-speaking server that fails when it is told to: ``python -m tests.support.faulty_s3 ADDRESS PORT``.

It is moto's server behind a switch. POST /_faults sets how it misbehaves from then on, and returns what was
counted since the last time; GET returns the counts alone ("matched": requests of the given path and method):

    {"every": 5, "status": 503}        every fifth request is refused with "SlowDown"
    {"every": 5, "status": 0}          every fifth request is never answered
    {"every": 3, "delay_s": 2}         every third request is answered two seconds late
    {…, "path": "/codes/"}             only requests whose path has this in it
    {…, "method": "PUT"}               only these requests
    {}                                 none: back to normal
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

REFUSAL = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>"


class Faults:
    """A WSGI application around another one."""

    def __init__(self, inner: Callable[..., Iterable[bytes]]) -> None:
        self.inner = inner
        self._lock = threading.Lock()
        self._settings: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/_faults":
            return self._set(environ, start_response)
        with self._lock:
            settings, hit = self._settings, self._hits(environ)
            self._counts["requests"] += 1
            if hit:
                self._counts["delayed" if "delay_s" in settings else "refused"] += 1
        if hit and "delay_s" in settings:
            time.sleep(settings["delay_s"])
        elif hit and settings.get("status", 503) == 0:
            raise ConnectionError("not answered on purpose")  # the server leaves the connection open
        elif hit:
            length = int(environ.get("CONTENT_LENGTH") or 0)
            environ["wsgi.input"].read(length)
            start_response(f"{settings.get('status', 503)} Refused", [("Content-Type", "application/xml")])
            return [REFUSAL]
        return self.inner(environ, start_response)

    def _hits(self, environ: dict[str, Any]) -> bool:
        settings = self._settings
        if not settings or settings.get("path", "") not in environ["PATH_INFO"]:
            return False
        if settings.get("method", environ["REQUEST_METHOD"]) != environ["REQUEST_METHOD"]:
            return False
        self._counts["matched"] += 1
        return self._counts["matched"] % settings["every"] == 0

    def _set(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            counted = dict(self._counts)
            if environ["REQUEST_METHOD"] == "POST":
                self._settings, self._counts = json.loads(body or b"{}"), Counter()
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps({"requests": 0, "matched": 0, "refused": 0, "delayed": 0, **counted}).encode()]


def main(address: str, port: int) -> None:
    """Serves until it is ended; prints a line when it is up."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *args: Any) -> None:
            pass

    application = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server(address, port, application, threaded=True, request_handler=Quiet)
    print("up", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
