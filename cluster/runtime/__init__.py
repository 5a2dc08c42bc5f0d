"""What every job needs from Ray: a connection, capacity, errors, telemetry."""

from cluster.runtime import capacity, connection, ray_internals, telemetry
from cluster.runtime.capacity import Need
from cluster.runtime.job import OUT_OF_MEMORY_ADVICE, hashnet_error_in, reraise_hashnet_error, run_job
from cluster.runtime.telemetry import run_name
from hashnet.io import events

events.log_folder = ray_internals.log_folder  # events of this process go beside Ray's own logs

__all__ = [
    "OUT_OF_MEMORY_ADVICE",
    "Need",
    "capacity",
    "connection",
    "hashnet_error_in",
    "ray_internals",
    "reraise_hashnet_error",
    "run_job",
    "run_name",
    "telemetry",
]
