"""ApiError: every error a client is told about, and the one place that turns it into a response."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from hashnet.errors import CodeError, HashnetError, IndexMismatch, RequestRejected, UnknownId, Unsupported


class ApiError(HashnetError):
    """An error response: a stable ``code`` for programs, a ``message`` for people, the HTTP ``status``.

    Inside a process it is raised. Between processes, and among the results of a batch, it is a value in the
    place of the result, so that one bad request does not spoil the others that are handled with it.
    """

    def __init__(self, code: str, message: str, status: int = 422) -> None:
        super().__init__(code, message, status)  # all three, so that it can be pickled
        self.code, self.message, self.status = code, message, status

    def __str__(self) -> str:
        return self.message

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which the request may succeed; None for an error that stays."""
        return 1 if self.status in (429, 503) else None

    @classmethod
    def of(cls, error: BaseException) -> ApiError | None:
        """What a client is told about ``error``; None for a failure of the server."""
        if isinstance(error, ApiError):
            return error
        message = str(error.args[0]) if error.args else str(error)
        if isinstance(error, RequestRejected):
            return cls(error.code, message, error.status)
        if isinstance(error, UnknownId):
            return cls("unknown_id", message, 404)
        if isinstance(error, Unsupported):
            return cls("unsupported", message)
        if isinstance(error, (IndexMismatch, CodeError)):
            return cls("invalid_request", message)
        return None


def server_failure(request_id: str) -> ApiError:
    """The error for an unexpected exception; the log has its stack trace."""
    return ApiError("internal", f"the server failed; its log has the details of request {request_id}", 500)


def error_response(error: ApiError, request_id: str) -> Response:
    """The HTTP response that tells a client about an error."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = {"error": {"code": error.code, "message": error.message, "request_id": request_id}}
    return Response(orjson.dumps(body), error.status, headers, media_type="application/json")
