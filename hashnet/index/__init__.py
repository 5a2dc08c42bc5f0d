"""The search index: BinaryIndex over FAISS files, with an exact engine of its own."""

from hashnet.index.binary import BinaryIndex
from hashnet.index.kinds import KINDS

__all__ = ["KINDS", "BinaryIndex"]
