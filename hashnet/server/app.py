"""The HTTP application over a Backend: routes, errors and the search page, as one ASGI application."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import hashnet
from hashnet.errors import HashnetError
from hashnet.server.auth import Access
from hashnet.server.backend import Backend
from hashnet.server.errors import ApiError, error_response, server_failure
from hashnet.server.middleware import RequestMiddleware, Telemetry
from hashnet.server.openapi import DESCRIPTION
from hashnet.server.routes import Routes
from hashnet.server.settings import Limits

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


def build_app(backend: Backend, limits: Limits, access: Access, telemetry: Telemetry) -> RequestMiddleware:
    """The application with its middleware."""
    app = FastAPI(
        title="hashnet",
        version=hashnet.__version__,
        description=DESCRIPTION,
        docs_url=None,  # Swagger's page loads scripts from elsewhere; the description is at /openapi.json
        redoc_url=None,
    )
    Routes(backend, limits, bool(access.write), telemetry).add_to(app)
    mount(app)
    app.add_exception_handler(HashnetError, _known_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    return RequestMiddleware(app, limits, access, telemetry)


def _respond(request: Request, error: ApiError) -> Response:
    record = request.scope["hashnet"]
    record.code = error.code
    return error_response(error, record.request_id)


def _known_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HashnetError)
    return _respond(request, ApiError.of(error))


def _unexpected_error(request: Request, error: Exception) -> Response:
    """A client learns the request id alone; the middleware writes the stack trace to the log."""
    return _respond(request, server_failure(request.scope["hashnet"].request_id))


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    code = f"{name}_out_of_range" if name in ("k", "radius") else "invalid_request"
    return _respond(request, ApiError(code, f"{name}: {first['msg']}"))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    response = _respond(request, ApiError(code, str(error.detail), error.status_code))
    response.headers.update(error.headers or {})
    return response
