"""What every job needs of Ray: a connection, capacity, errors, telemetry."""

from cluster.runtime import connection, placement, ray_internals, telemetry
from cluster.runtime.errors import LESS_MEMORY, ours, raise_ours
from cluster.runtime.job import run_job
from cluster.runtime.nodes import describe
from cluster.runtime.planning import Need
from cluster.runtime.telemetry import run_name
from hashnet.io import events

events.log_folder = ray_internals.log_folder  # events of this process go beside Ray's own logs

__all__ = [
    "LESS_MEMORY",
    "Need",
    "connection",
    "describe",
    "ours",
    "placement",
    "raise_ours",
    "run_job",
    "run_name",
    "telemetry",
]
