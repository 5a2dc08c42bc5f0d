"""Manifests, the sources they are made from, splits, pairs, and pictures as pixels."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.data.columns import (
        check_labels,
        expand_pattern,
        feature_matrix,
        feature_rows,
        further_columns,
        plain_column,
        read_labels,
        read_names,
        schema_type,
    )
    from hashnet.data.feature_checks import ordinary_rows, varying_columns
    from hashnet.data.fetch import OUT_OF_REACH, fetch_images, too_many_bad
    from hashnet.data.images import FORMATS, PREPROCESS_VERSION, Preprocess, decode, is_plain_jpeg
    from hashnet.data.manifest import Manifest, ManifestArtefact
    from hashnet.data.pairs import (
        NEAREST,
        NEIGHBOURS,
        PairTable,
        lists_neighbours,
        nearest_rows,
        neighbour_pairs,
    )
    from hashnet.data.sources import SOURCES, append_source, load_source, make_manifest, source_options
    from hashnet.data.splits import Protocol
    from hashnet.data.summary import check_pictures, notes, unreadable_warning
    from hashnet.data.writer import EXISTING, copy_without, refuse_duplicates, write_arrays, zero_shot_copy

__all__, __getattr__ = lazy_names(__name__)
