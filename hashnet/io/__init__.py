"""Files by path or URI, configurations, progress, events, and Arrow arrays."""

from hashnet.io import config, events, storage
from hashnet.io.arrow import TableBuffer, as_array, binary_column, binary_matrix, rechunk
from hashnet.io.artefact import Artefact, Description, Header, fingerprint, wrong_files
from hashnet.io.config import REQUIRED, Renamed, check_whole, key
from hashnet.io.lazy import lazy_names
from hashnet.io.progress import Progress, counted, duration, speed

__all__ = [
    "REQUIRED",
    "Artefact",
    "Description",
    "Header",
    "Progress",
    "Renamed",
    "TableBuffer",
    "as_array",
    "binary_column",
    "binary_matrix",
    "check_whole",
    "config",
    "counted",
    "duration",
    "events",
    "fingerprint",
    "key",
    "lazy_names",
    "rechunk",
    "speed",
    "storage",
    "wrong_files",
]
