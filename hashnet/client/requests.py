"""What both clients do without touching the network: make requests, judge answers, join parts."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import numpy as np

from hashnet import __version__
from hashnet.client import wire
from hashnet.client.queries import Queries, as_ids, label_lists
from hashnet.errors import DataError, RequestRejected, ServerFailed, ServerUnavailable
from hashnet.results import SearchResult

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
KINDS = (wire.ARROW, "application/json", "image/jpeg")
ROUNDS = 5  # how often parts answered by an older version are asked again


@dataclass(frozen=True)
class Ask:
    """One request. ``safe`` ones change nothing, so they may be sent twice."""

    method: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    safe: bool = True

    def arguments(self) -> dict[str, Any]:
        """What httpx takes."""
        headers = {"content-type": wire.ARROW} if self.body is not None else {}
        return {
            "method": self.method,
            "url": self.path,
            "params": self.params or None,
            "content": self.body,
            "headers": headers,
        }

    def at_least(self, version: int) -> Ask:
        """The same request, to be answered by this index version or a newer one."""
        return replace(self, params=self.params | {"min_version": version})


class Asker:
    """The settings of a client, its requests, and what to do with an answer."""

    def __init__(
        self, url: str, token: str | None, timeout_s: float, retry_s: float, batch: int, parallel: int
    ) -> None:
        if not str(url).startswith(("http://", "https://")):
            raise DataError(f"{url!r} is not a server's address; give one like http://127.0.0.1:8000")
        for name, value in (("timeout_s", timeout_s), ("batch", batch), ("parallel", parallel)):
            if value <= 0:
                raise DataError(f"{name} must be positive, got {value}")
        self.url = str(url).rstrip("/")
        self.timeout_s, self.retry_s, self.batch, self.parallel = timeout_s, retry_s, batch, parallel
        self._token = (token or os.environ.get("HASHNET_TOKEN", "")).strip()
        self._written = 0  # the newest version this client wrote: its own reads must not be older

    def http_options(self) -> dict[str, Any]:
        """What the httpx client is made with."""
        headers = {
            "user-agent": f"hashnet/{__version__}",
            "accept": f"{wire.ARROW}, application/json, image/*",
        }
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout_s, connect=min(5.0, self.timeout_s)),
            "limits": httpx.Limits(max_connections=self.parallel + 4),
        }

    def ask_search(
        self, queries: Queries, params: dict[str, int], labels: Sequence[int | str] | None, exclude_self: bool
    ) -> list[Ask]:
        """One search request a part of the queries."""
        asked: dict[str, Any] = {name: int(value) for name, value in params.items()}
        if labels is not None:
            listed = [labels] if isinstance(labels, (int, str, np.integer)) else list(labels)
            if not listed:
                raise DataError("labels= names none; leave it out to search everything")
            odd = [v for v in listed if isinstance(v, bool) or not isinstance(v, (int, str, np.integer))]
            if odd:
                raise DataError(f"labels= takes class ids and names, got {odd[0]!r}")
            # Apart: in an address all is text, and a class may be called "1" that is not class 1.
            asked["labels"] = [label for label in listed if isinstance(label, str)]
            asked["label_ids"] = [int(label) for label in listed if not isinstance(label, str)]
        if exclude_self:
            asked["exclude_self"] = "true"
        if self._written:
            asked["min_version"] = self._written
        return [
            Ask("POST", "/v1/search", asked, wire.write_queries(part)) for part in queries.parts(self.batch)
        ]

    def ask_encode(self, queries: Queries) -> list[Ask]:
        """One encode request a part of the batch."""
        if queries.kind not in ("images", "features"):
            raise DataError(f"only pictures and features can be encoded, got {queries.kind}")
        return [Ask("POST", "/v1/encode", {}, wire.write_queries(part)) for part in queries.parts(self.batch)]

    def ask_add(self, queries: Queries, ids: Any, labels: Any) -> list[Ask]:
        """One add request a part of the items."""
        ids = as_ids(ids)
        for name, column in (("ids", ids), ("labels", labels)):
            if column is not None and len(column) != len(queries):
                raise DataError(f"{len(queries)} items came with {len(column)} {name}")
        asks, start = [], 0
        for part in queries.parts(self.batch):
            rows = slice(start, start + len(part))
            some_labels = None if labels is None else label_lists(labels[rows])
            body = wire.write_items(part, ids[rows], some_labels)
            asks.append(Ask("POST", "/v1/items", {}, body, safe=False))
            start += len(part)
        return asks

    def ask_remove(self, ids: Any) -> list[Ask]:
        """One remove request a part of the ids."""
        parts = Queries("ids", as_ids(ids)).parts(self.batch)
        return [Ask("POST", "/v1/items/remove", {}, wire.write_queries(part), safe=False) for part in parts]

    def wrote(self, answer: httpx.Response) -> None:
        """Remembers the version that was written, so that searches of this client see it."""
        self._written = max(self._written, answer.json()["version"])

    def judge(
        self, ask: Ask, answer: httpx.Response | httpx.TransportError, attempt: int, elapsed_s: float
    ) -> float | None:
        """None for a good answer, the seconds to wait before sending again, or the error, raised."""
        if isinstance(answer, httpx.Response) and answer.is_success and _kind(answer) in KINDS:
            return None
        error, again, wished_s = _verdict(ask, answer, self.url)
        pause = max(min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0), wished_s)
        if not again or elapsed_s + pause > self.retry_s:
            raise error from (answer if isinstance(answer, Exception) else None)
        return pause


def _verdict(
    ask: Ask, answer: httpx.Response | httpx.TransportError, url: str
) -> tuple[Exception, bool, float]:
    """(the error it is, whether sending again may help, seconds the server asks to wait)."""
    if isinstance(answer, httpx.Response):
        code, sentence = _said(answer)
        if answer.status_code < 400:
            what = f"with {answer.status_code} and {_kind(answer) or 'no content type'}"
            return ServerFailed(f"{url} answers {what}: is this the address of a server?"), False, 0.0
        if answer.status_code in (429, 503):  # with our code: refused before anything was done
            busy = ServerUnavailable(f"{url} is busy: {sentence}")
            return busy, ask.safe or bool(code), _retry_after(answer)
        if answer.status_code < 500:
            return RequestRejected(sentence, code=code, status=answer.status_code), False, 0.0
        # Without our JSON it is not the application that speaks: its process was lost on the way.
        failed = ServerFailed(f"{url} failed with {answer.status_code}: {sentence}")
        return failed, ask.safe and not code, 0.0
    if isinstance(answer, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)):
        what = f"cannot reach {url} ({answer or type(answer).__name__}); is a server running there?"
        return ServerUnavailable(f"{what} jobs/serve.py starts one"), True, 0.0
    if isinstance(answer, httpx.UnsupportedProtocol):
        return DataError(str(answer)), False, 0.0
    what = "did not answer in time" if isinstance(answer, httpx.TimeoutException) else "broke the connection"
    return ServerUnavailable(f"{url} {what} ({type(answer).__name__})"), ask.safe, 0.0


def _kind(answer: httpx.Response) -> str:
    """What it carries: Arrow, JSON, a picture (any counts as JPEG)."""
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    return "image/jpeg" if kind.startswith("image/") else kind


def _said(answer: httpx.Response) -> tuple[str, str]:
    """The code and the sentence of an error answer; no code when it is not ours."""
    try:
        error = answer.json()["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "", answer.text[:200].strip() or answer.reason_phrase


def _retry_after(answer: httpx.Response) -> float:
    text = answer.headers.get("retry-after", "")
    try:
        return min(float(text), LONGEST_PAUSE_S) if text else 0.0
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(text)
        return min(max(moment.timestamp() - time.time(), 0.0), LONGEST_PAUSE_S)
    except ValueError:
        return 0.0


def versions_of(part: SearchResult | list[SearchResult]) -> set[int | None]:
    return {part.version} if isinstance(part, SearchResult) else {hit.version for hit in part}


def settle(parts: list[Any]) -> Iterator[tuple[list[int], int]]:
    """(parts to ask again, version they must have), until all parts come from one index version.

    The caller replaces those parts in ``parts`` between two steps. An index that keeps changing
    faster than that is let go after ROUNDS; the joined answer then has no version.
    """
    for _ in range(ROUNDS):
        seen = [max((v for v in versions_of(part) if v is not None), default=None) for part in parts]
        known = [version for version in seen if version is not None]
        if not known or min(known) == max(known):
            return
        newest = max(known)
        yield [i for i, version in enumerate(seen) if version is not None and version < newest], newest


def together(parts: list[SearchResult], k: int) -> SearchResult:
    """One (q, k) result of the parts of a batch."""
    if not parts:
        return SearchResult(np.zeros((0, k), np.int64), np.zeros((0, k), np.int32))
    versions = {part.version for part in parts}
    return SearchResult(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.distances for part in parts]),
        versions.pop() if len(versions) == 1 else None,
    )
