"""Files by path or URI, configurations, progress and events, and Arrow arrays."""

from hashnet.io import config, events, storage
from hashnet.io.arrow import (
    TableBuffer,
    as_array,
    binary_column,
    binary_matrix,
    check_ids,
    rechunk,
    type_from_text,
)
from hashnet.io.artefact import (
    Artefact,
    Description,
    Header,
    check_file,
    fingerprint,
    read_checked,
    read_sealed,
    sealed,
    write_sealed,
)
from hashnet.io.config import REQUIRED, Renamed, check_whole, key
from hashnet.io.events import Progress, counted, duration, speed
from hashnet.io.lazy import lazy_names

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
    "check_file",
    "check_ids",
    "check_whole",
    "config",
    "counted",
    "duration",
    "events",
    "fingerprint",
    "key",
    "lazy_names",
    "read_checked",
    "read_sealed",
    "rechunk",
    "sealed",
    "speed",
    "storage",
    "type_from_text",
    "write_sealed",
]
