"""Encoding: pictures or feature rows → logits → codes, on the engine that suits the machine."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.encoding.encoder import Encoder, code_lineage
    from hashnet.encoding.engines import Engine, choose_engine
    from hashnet.encoding.tasks import EncodeTask, RowReader, feature_tasks, picture_tasks, repair_tasks
    from hashnet.encoding.worker import (
        ShardCollector,
        commit_table,
        encode_features,
        encode_rows,
        picture_rows,
        reasons_of,
    )

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "encoder": ["Encoder", "code_lineage"],
        "engines": ["Engine", "choose_engine"],
        "worker": [
            "ShardCollector",
            "commit_table",
            "encode_features",
            "encode_rows",
            "picture_rows",
            "reasons_of",
        ],
        "tasks": ["EncodeTask", "RowReader", "feature_tasks", "picture_tasks", "repair_tasks"],
    },
)
