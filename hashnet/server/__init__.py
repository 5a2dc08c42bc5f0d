"""The HTTP application of a served run: routes, schemas, authentication, limits, the page. No Ray."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.server.app import build_app
    from hashnet.server.backend import Backend, behind, codes_or_raise, gauges
    from hashnet.server.calls import IndexAnswer, IndexAsk
    from hashnet.server.encoder_holder import EncoderHolder
    from hashnet.server.index_holder import IndexHolder
    from hashnet.server.middleware import digest, later, reply, writes
    from hashnet.server.settings import (
        READ_TOKEN,
        WRITE_TOKEN,
        Limits,
        ServeConfig,
        Tokens,
        is_loopback,
        read_tokens,
    )
    from hashnet.server.startup import Ground, look_over, open_catalog
    from hashnet.server.telemetry import Meter, prometheus
    from hashnet.server.writer import Writer, written_or_raise

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "app": ["build_app"],
        "backend": ["Backend", "behind", "codes_or_raise", "gauges"],
        "calls": ["IndexAnswer", "IndexAsk"],
        "encoder_holder": ["EncoderHolder"],
        "index_holder": ["IndexHolder"],
        "middleware": ["digest", "later", "reply", "writes"],
        "settings": [
            "Limits",
            "READ_TOKEN",
            "ServeConfig",
            "Tokens",
            "WRITE_TOKEN",
            "is_loopback",
            "read_tokens",
        ],
        "startup": ["Ground", "look_over", "open_catalog"],
        "telemetry": ["Meter", "prometheus"],
        "writer": ["Writer", "written_or_raise"],
    },
)
