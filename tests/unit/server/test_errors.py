"""What a client is told of an error, and what only the log has."""

from __future__ import annotations

import pytest

from hashnet.errors import StorageError
from hashnet.server import ApiError


def test_a_server_failure_is_in_the_log_and_not_in_the_response(caplog: pytest.LogCaptureFixture) -> None:
    error = ApiError.of(StorageError("cannot read s3://bucket/secret"))
    assert (error.code, error.status) == ("internal", 500)
    assert "secret" not in str(error)
    assert caplog.messages == ["a request failed"]  # a search, an encoding or a write
    assert "s3://bucket/secret" in caplog.text
