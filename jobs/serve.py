"""Serve a run's index over HTTP with a search page, until Ctrl-C.

    python jobs/serve.py run=$PWD/runs/demo host=127.0.0.1 port=8000

Then open http://127.0.0.1:8000/, or use hashnet.Client, `hashnet query` or curl. Any address other than
loopback needs a token: HASHNET_TOKEN for reading; HASHNET_WRITE_TOKEN enables writing.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.runtime import run_job
from cluster.serve import serve_run
from hashnet.server import ServeConfig

if __name__ == "__main__":
    run_job(ServeConfig, serve_run)
