"""What every job needs from Ray: a connection, capacity, errors, telemetry."""

from typing import TYPE_CHECKING

from cluster.runtime.ray_internals import log_folder
from hashnet.io import events, lazy_names

if TYPE_CHECKING:
    from cluster.runtime import capacity, connection, ray_internals, telemetry
    from cluster.runtime.capacity import Need
    from cluster.runtime.job import (
        FULL_DISK,
        OUT_OF_MEMORY_ADVICE,
        hashnet_error_in,
        reraise_hashnet_error,
        run_job,
    )
    from cluster.runtime.telemetry import run_name

events.log_folder = log_folder  # events of this process go beside Ray's own logs

__all__, __getattr__ = lazy_names(__name__)
