"""A run served on Ray Serve, whole in every replica or in slices.

``serve_run`` serves until interrupted, ``Server`` is the same as a context manager, ``application`` is
what a Serve configuration file names.
"""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from cluster.serve.deployment import application
    from cluster.serve.server import Server, serve_run

__all__, __getattr__ = lazy_names(__name__)
