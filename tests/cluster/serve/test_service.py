"""The server deployed by Serve's own configuration, as a RayService does it."""

import json
import time
import urllib.error
import urllib.request

import pytest
import yaml

from hashnet.codes import pack_signs
from hashnet.index.binary import BinaryIndex
from tests.support.local_cluster import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOKEN = "a-token-of-some-length"


@pytest.fixture
def cluster(new_cluster, repo):
    made = new_cluster()
    made.env |= {"PYTHONPATH": str(repo), "HASHNET_TOKEN": TOKEN}  # an image and a secret, on Kubernetes
    made.add_node("head", cpus=0)
    made.add_node("node-1", cpus=2)
    return made


def call(url, token=TOKEN, method="GET", body=None):
    """Status and JSON of one request."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        url, method=method, headers=headers, data=body and json.dumps(body).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, None
    except OSError:
        return 0, None


def test_the_rayservice_configuration_serves_a_run(cluster, repo, tmp_path):
    signs = [[1 if (row >> bit) & 1 else -1 for bit in range(16)] for row in range(200)]
    BinaryIndex.from_arrays(pack_signs(signs)).save(str(tmp_path / "run/index"))
    document, _ = yaml.safe_load_all((repo / "cluster/deploy/kubernetes/serve.yaml").read_text())
    config = yaml.safe_load(document["spec"]["serveConfigV2"])
    (port,) = free_ports(1)
    config |= {"proxy_location": "Disabled"}  # its own port may be taken on this machine
    config["applications"][0]["args"] = {"run": str(tmp_path / "run"), "threads": 1, "port": port}
    secret = (cluster.folder / "token").read_text()
    dashboard = f"{cluster.env['RAY_API_SERVER_ADDRESS']}/api/serve/applications/"
    assert call(dashboard, secret, "PUT", config)[0] == 200
    deadline = time.monotonic() + 300
    while call(f"http://127.0.0.1:{port}/readyz")[0] != 200:
        found = call(dashboard, secret)[1]["applications"].get("hashnet", {})
        assert found.get("status") != "DEPLOY_FAILED", found.get("message")
        assert time.monotonic() < deadline, found
        time.sleep(1)
    status, about = call(f"http://127.0.0.1:{port}/v1/info")
    assert (status, about["n_bits"]) == (200, 16)
    assert call(f"http://127.0.0.1:{port}/v1/info", token="wrong")[0] == 401
