"""ApiRequest: one HTTP request. When it is sent again, and which error its caller gets in the end.

Both clients loop over the same attempts and only differ in how they send and sleep::

    for attempt in policy.attempts(idempotent=True):
        time.sleep(attempt.pause_s)
        with attempt:
            attempt.response = http.request(...)
    return attempt.response
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from itertools import count
from typing import Any

import httpx

from hashnet.client import wire
from hashnet.errors import DataError, RequestRejected, ServerFailed, ServerUnavailable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


@dataclass(frozen=True)
class ApiRequest:
    """One HTTP request. An idempotent one changes nothing, so it may be sent twice."""

    method: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    idempotent: bool = True
    names: tuple[str, ...] = ()  # paths of the pictures in the body

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``httpx.Client.request``."""
        headers = {"content-type": wire.ARROW} if self.body is not None else {}
        return {
            "method": self.method,
            "url": self.path,
            "params": self.params or None,
            "content": self.body,
            "headers": headers,
        }

    def at_least(self, version: int) -> ApiRequest:
        """The same request, to be answered by this index version or a newer one."""
        return replace(self, params=self.params | {"min_version": version})


@dataclass
class Attempt:
    """One attempt at a request, made ``pause_s`` seconds after the one before it.

    As a context manager it keeps the transport error that sending raised.
    """

    pause_s: float = 0.0
    response: httpx.Response | None = field(default=None, init=False)
    error: httpx.TransportError | None = field(default=None, init=False)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, httpx.TransportError):
            self.error = error
            return True
        return False


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed, whether another may succeed, and how long the server asked to wait."""

    error: Exception
    retry: bool = False
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class RetryPolicy:
    """Growing, jittered pauses for at most ``retry_s`` seconds; a server's Retry-After is respected."""

    url: str
    retry_s: float

    def attempts(self, idempotent: bool, names: Sequence[str] = ()) -> Iterator[Attempt]:
        """Attempts until one has a good response; raises the last one's error when time is up.

        The error about one of several pictures has its path, of ``names``, in place of its number.

        A request that is not idempotent is repeated only when the server cannot have carried it out.
        """
        started, attempt = time.monotonic(), Attempt()
        for number in count():
            yield attempt
            failure = self._failure(attempt, idempotent)
            if failure is None:
                return
            pause_s = min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            pause_s = max(pause_s, failure.retry_after_s)
            if not failure.retry or time.monotonic() - started + pause_s > self.retry_s:
                raise _with_path(failure.error, names) from attempt.error
            attempt = Attempt(pause_s)

    def _failure(self, attempt: Attempt, idempotent: bool) -> Failure | None:
        if attempt.error is not None:
            return self._transport_failure(attempt.error, idempotent)
        assert attempt.response is not None
        if attempt.response.is_success and _is_known_content(attempt.response):
            return None
        return self._response_failure(attempt.response, idempotent)

    def _response_failure(self, response: httpx.Response, idempotent: bool) -> Failure:
        status, (code, message) = response.status_code, _error_of(response)
        if status < 400:
            content = _content_type(response) or "no content type"
            sentence = f"{self.url} responds with {status} and {content}: is this the address of a server?"
            return Failure(ServerFailed(sentence))
        if status in (429, 503):  # with an error code: refused before anything was done
            busy = ServerUnavailable(f"{self.url} is busy: {message}")
            return Failure(busy, idempotent or bool(code), _retry_after_s(response))
        if status < 500:
            return Failure(RequestRejected(message, code=code, status=status))
        # Without an error code it was not the application that responded: its process was lost.
        failed = ServerFailed(f"{self.url} failed with {status}: {message}")
        return Failure(failed, idempotent and not code)

    def _transport_failure(self, error: httpx.TransportError, idempotent: bool) -> Failure:
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)):
            reason = str(error) or type(error).__name__
            sentence = (
                f"cannot reach {self.url} ({reason}); is a server running there? hashnet serve RUN starts one"
            )
            return Failure(ServerUnavailable(sentence), retry=True)
        if isinstance(error, httpx.UnsupportedProtocol):
            return Failure(DataError(str(error)))
        timed_out = isinstance(error, httpx.TimeoutException)
        what = "did not respond in time" if timed_out else "broke the connection"
        return Failure(ServerUnavailable(f"{self.url} {what} ({type(error).__name__})"), retry=idempotent)


def _with_path(error: Exception, names: Sequence[str]) -> Exception:
    """The error with the path of a refused picture, which a server knows as "the file" or "image 3"."""
    if isinstance(error, RequestRejected) and error.code in ("not_an_image", "image_too_large"):
        found = re.match(r"the file|image (\d+)", str(error.args[0]))
        number = int(found[1] or 0) if found else 0
        if found and number < len(names) and names[number]:
            error.args = (names[number] + error.args[0][found.end() :], *error.args[1:])
    return error


def _content_type(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_known_content(response: httpx.Response) -> bool:
    """Whether it carries what a hashnet server sends: Arrow, JSON or a picture."""
    content = _content_type(response)
    return content in (wire.ARROW, "application/json") or content.startswith("image/")


def _error_of(response: httpx.Response) -> tuple[str, str]:
    """(code, message) of an error response; no code when the application did not write it."""
    try:
        error = response.json()["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "", response.text[:200].strip() or response.reason_phrase


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds of the Retry-After header, given as a number or as a date; bounded."""
    text = response.headers.get("retry-after", "")
    try:
        return min(float(text), LONGEST_PAUSE_S) if text else 0.0
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(text)
        return min(max(moment.timestamp() - time.time(), 0.0), LONGEST_PAUSE_S)
    except ValueError:
        return 0.0
