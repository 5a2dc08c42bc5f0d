"""The HTTP application of a served run: routes, schemas, authentication, limits, the search page. No Ray.

``build_app`` makes the ASGI application over a ``Backend``, which reaches the index (``IndexService``), the
model (``EncoderProcess``) and the writer (``IndexWriter``). ``serve_standalone`` runs it on one machine.
"""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.server.app import Backend, build_app
    from hashnet.server.batching import Batcher
    from hashnet.server.encoder import BatchEncoder, EncodeRequest, EncoderProcess, serve_encoder
    from hashnet.server.http_server import HttpServer, Telemetry
    from hashnet.server.live_index import (
        IndexedItems,
        IndexInfo,
        IndexService,
        LiveIndex,
        SearchOptions,
        SearchRequest,
        SearchResponse,
        check_width,
        too_many_hits,
        used_ids,
    )
    from hashnet.server.schemas import ApiError, error_response
    from hashnet.server.settings import (
        NO_MODEL,
        READ_TOKEN,
        WRITE_TOKEN,
        Access,
        Limits,
        ServeConfig,
        ServedRun,
        is_loopback,
    )
    from hashnet.server.standalone import listen, serve_standalone, welcome
    from hashnet.server.writer import AddItems, Change, IndexWriter, RemoveItems, Written

__all__, __getattr__ = lazy_names(__name__)
