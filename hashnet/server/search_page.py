"""The search page: the files of ``page/``, served from memory."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import FastAPI, Request, Response

MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def mount(app: FastAPI) -> None:
    """Adds ``/`` and ``/static/NAME``; they are not in the OpenAPI description."""
    folder = files("hashnet.server") / "page"
    content = {name: (folder / name).read_bytes() for name in MEDIA_TYPES}
    tags = {name: f'"{hashlib.sha256(data).hexdigest()[:16]}"' for name, data in content.items()}

    def respond(name: str, request: Request) -> Response:
        headers = {"etag": tags[name], "cache-control": "no-cache"}
        if tags[name] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content[name], media_type=MEDIA_TYPES[name], headers=headers)

    def add(path: str, name: str) -> None:
        def endpoint(request: Request) -> Response:
            return respond(name, request)

        app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False)

    add("/", "index.html")
    for name in MEDIA_TYPES:
        if name != "index.html":
            add(f"/static/{name}", name)
