"""Encoding: pictures or feature rows → logits → codes, on the engine that suits the machine."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.encoding.encoder import Encoder, LocalEncoder, code_lineage
    from hashnet.encoding.engines import Engine, choose_engine
    from hashnet.encoding.feature_cache import BackboneFeatures
    from hashnet.encoding.worker import (
        BOTH,
        EncodeTask,
        RowReader,
        ShardCollector,
        Target,
        commit_table,
        encode_features,
        encode_rows,
        feature_tasks,
        picture_rows,
        picture_tasks,
        reasons_of,
        repair_tasks,
        shard_tasks,
    )

__all__, __getattr__ = lazy_names(__name__)
