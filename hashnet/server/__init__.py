"""The HTTP application of a served run: routes, schemas, authentication, limits, the search page. No Ray.

``build_app`` makes the ASGI application over a ``Backend``, which reaches the index (``LiveIndex``), the
model (``BatchEncoder``) and the writer (``IndexWriter``), in this process or in others.
"""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.server.app import build_app
    from hashnet.server.auth import READ_TOKEN, WRITE_TOKEN, Access, is_loopback
    from hashnet.server.backend import Backend
    from hashnet.server.batch_encoder import BatchEncoder
    from hashnet.server.errors import ApiError, error_response, result_or_raise
    from hashnet.server.live_index import IndexWriter, LiveIndex
    from hashnet.server.messages import (
        AddItems,
        IndexedItems,
        IndexInfo,
        RemoveItems,
        SearchRequest,
        SearchResponse,
        Written,
    )
    from hashnet.server.middleware import SECURITY_HEADERS, Telemetry, is_write
    from hashnet.server.served_run import ServedRun
    from hashnet.server.settings import NO_MODEL, Limits, ServeConfig

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "app": ["build_app"],
        "auth": ["Access", "READ_TOKEN", "WRITE_TOKEN", "is_loopback"],
        "backend": ["Backend"],
        "batch_encoder": ["BatchEncoder"],
        "errors": ["ApiError", "error_response", "result_or_raise"],
        "live_index": ["IndexWriter", "LiveIndex"],
        "messages": [
            "AddItems",
            "IndexInfo",
            "IndexedItems",
            "RemoveItems",
            "SearchRequest",
            "SearchResponse",
            "Written",
        ],
        "middleware": ["SECURITY_HEADERS", "Telemetry", "is_write"],
        "served_run": ["ServedRun"],
        "settings": ["Limits", "NO_MODEL", "ServeConfig"],
    },
)
