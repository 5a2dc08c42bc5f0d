"""Encoding: pictures or feature rows → logits → codes, by engines that fit the machine."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.encoding.encoder import Encoder, versions
    from hashnet.encoding.engines import Engine, choose, facts
    from hashnet.encoding.pipeline import (
        Gatherer,
        commit_table,
        encode_features,
        encode_rows,
        picture_rows,
        reasons_of,
    )
    from hashnet.encoding.tasks import Source, Work, feature_works, picture_works, repair_works

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "encoder": ["Encoder", "versions"],
        "engines": ["Engine", "choose", "facts"],
        "pipeline": [
            "Gatherer",
            "commit_table",
            "encode_features",
            "encode_rows",
            "picture_rows",
            "reasons_of",
        ],
        "tasks": ["Source", "Work", "feature_works", "repair_works", "picture_works"],
    },
)
