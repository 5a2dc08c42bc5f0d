"""GET /metrics."""

from __future__ import annotations

from collections.abc import Callable

from fastapi.testclient import TestClient

from hashnet.client import Queries, wire
from hashnet.server.middleware import RequestMiddleware
from tests.support.serving_app import (
    BASE,
)
from tests.support.small_run import some_codes


def test_metrics(app: Callable[..., RequestMiddleware]) -> None:
    with TestClient(app(), base_url=BASE) as http:
        body = wire.write_queries(Queries("codes", some_codes(3)))
        http.post("/v1/search", content=body, headers={"content-type": wire.ARROW})
        http.get("/v1/items/99999")
        text = http.get("/metrics").text
    assert 'hashnet_requests_total{method="POST",route="/v1/search",status="200"} 1.0' in text
    assert 'hashnet_requests_total{method="GET",route="/v1/items/{id}",status="404"} 1.0' in text
    assert 'hashnet_queries_total{route="/v1/search"} 3.0' in text
    assert "hashnet_index_size 400.0" in text
