"""The files of the search page."""

from __future__ import annotations

from starlette.testclient import TestClient


def test_the_page_asks_nobody_else(http: TestClient) -> None:
    for path in ("/", "/static/app.js", "/static/style.css", "/static/icon.svg"):
        text = http.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
    page = http.get("/").text
    assert "style=" not in page  # the content security policy would drop it
    assert "onclick" not in page
