"""The search index: BinaryIndex over FAISS files, with an exact engine of its own.

Names load on first use: IndexArtefact, which reads an index's header, needs no FAISS.
"""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.index.artefact import IndexArtefact
    from hashnet.index.binary import BinaryIndex
    from hashnet.index.changelog import CodeBlock
    from hashnet.index.expressions import with_class_ids
    from hashnet.index.kinds import KINDS, parse_options
    from hashnet.index.product_quantisation import quantised_neighbours
    from hashnet.index.search import check_ids, check_search_size, check_width
    from hashnet.index.segment import IndexSpec, read_code_blocks

__all__, __getattr__ = lazy_names(__name__)
