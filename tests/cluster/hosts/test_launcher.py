"""`ray up`, `ray dashboard`, `ray job submit` and `ray down` by Ray's own launcher, over ssh to two hosts.

What is launched is derived from ray_cluster.yaml, so that it cannot drift from it: the files that are brought
to every node, the set-up and start commands and the variables of the containers are the same. Different are
the provider (`local`: machines that are there already), hence node types and resources; no docker, no
file system to mount; pip leaves out the dependencies (7 GB), which the hosts share with this machine.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
from getpass import getuser
from pathlib import Path

import pytest
import yaml

from tests.support.hosts import CHECKOUT, DESK, Hosts
from tests.support.local_cluster import job_result
from tests.support.wait import wait_until

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin") or ""
TOOLS = {"sshd": SSHD, "ssh": shutil.which("ssh"), "rsync": shutil.which("rsync")}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.hosts,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not all(TOOLS.values()),
        reason="Ray's launcher needs sshd, ssh and rsync (Debian: openssh-server, openssh-client, rsync)",
    ),
]

CONTAINER_HOME = "/home/ray"  # in ray_cluster.yaml
PIP = "pip install"
WITHOUT_DEPENDENCIES = "pip install --no-deps --no-build-isolation --no-index --target ~/installed"
SSHD_CONFIG = """
ListenAddress {address}
HostKey /run/ssh_key
AuthorizedKeysFile {home}/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
"""


def twin(launcher: dict, key: Path, home: str, head: str, workers: list[str]) -> dict:
    """ray_cluster.yaml for machines that are there already, with ``home`` in the place of the container's."""
    moved = yaml.safe_load(yaml.safe_dump(launcher).replace(CONTAINER_HOME, home))
    for name in ("docker", "initialization_commands", "available_node_types", "head_node_type"):
        del moved[name]
    assert sum(PIP in command for command in moved["setup_commands"]) == 1
    return moved | {
        "provider": {"type": "local", "head_ip": head, "worker_ips": workers},
        "auth": {"ssh_user": "root", "ssh_private_key": str(key)},
        "max_workers": len(workers),
        "setup_commands": [line.replace(PIP, WITHOUT_DEPENDENCIES) for line in moved["setup_commands"]],
    }


def container_variables(launcher: dict) -> list[str]:
    """NAME=value of every `-e` that the containers of all nodes are started with."""
    words = [word for option in launcher["docker"]["run_options"] for word in shlex.split(option)]
    return [value for flag, value in itertools.pairwise(words) if flag == "-e"]


@pytest.fixture
def machines(repo):
    """Two hosts with an ssh server and without Ray, the storage, and a key to enter them with."""
    launcher = yaml.safe_load((repo / "ray_cluster.yaml").read_text())
    with Hosts() as hosts:
        hosts.start_storage()
        key, home = hosts.folder / "key", hosts.env["HOME"]
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        kept = [f"{name}={hosts.env[name]}" for name in hosts.env if name.startswith(("AWS_", "PATH"))]
        profile = "".join(f"export {shlex.quote(line)}\n" for line in [*container_variables(launcher), *kept])
        for name in ("head", "worker"):
            host = hosts.add_bare(name)
            files = {
                "~/authorized_keys": key.with_suffix(".pub").read_text(),
                "~/.bashrc": profile,  # in the place of docker's -e, and of the node's role for the storage
                "/run/sshd_config": SSHD_CONFIG.format(address=host.address, home=home),
            }
            for place, text in files.items():
                hosts.run(name, ["sh", "-c", f"cat >{place}"], input=text)
            hosts.run(name, ["sh", "-c", "rm -r ~/.ray"])  # `ray up` brings the token
            made = hosts.run(name, ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/run/ssh_key"])
            assert made.returncode == 0, made.stdout
            started = hosts.run(name, ["sh", "-c", f"mkdir -p /run/sshd && {SSHD} -f /run/sshd_config"])
            assert started.returncode == 0, started.stdout
        launcher["cluster_name"] = hosts.folder.name  # names files of the launcher, here and on the head
        yield hosts, launcher, key
    user, name = (hashlib.sha256(text.encode()).hexdigest()[:10] for text in (getuser(), hosts.folder.name))
    shutil.rmtree(f"/tmp/ray_ssh_{user}/{name}", ignore_errors=True)
    for left in Path("/tmp/ray").glob(f"cluster-{hosts.folder.name}.*"):
        left.unlink()


def test_a_cluster_is_launched_used_and_ended(machines):
    hosts, launcher, key = machines
    desk_home = hosts.folder / "home"
    (desk_home / ".ray").mkdir(parents=True)
    (desk_home / ".ray" / "auth_token").write_text(hosts.token)
    home, (head, worker) = hosts.env["HOME"], (hosts.hosts[name].address for name in ("head", "worker"))
    file = hosts.folder / "local.yaml"
    file.write_text(yaml.safe_dump(twin(launcher, key, home, head, [worker])))
    # Ray's second autoscaler does not know the head of a `local` cluster, and then starts no workers.
    own = {"HOME": str(desk_home), "RAY_UP_enable_autoscaler_v2": "0"}

    def ray(*words: str) -> str:
        done = hosts.run(DESK, ["ray", *words], 600, **own)
        assert done.returncode == 0, done.stdout
        return done.stdout

    ray("up", "-y", "--no-config-cache", str(file))
    for name in ("head", "worker"):  # what the set-up commands and file_mounts leave on every node
        wait_until(lambda name=name: hosts.processes(name, "/raylet/raylet"), 300)
        assert hosts.run(name, ["sh", "-c", "cat ~/.ray/auth_token"]).stdout == hosts.token
        installed = "PYTHONPATH=~/installed python -c 'import hashnet; print(hashnet.__file__)'"
        assert f"{home}/installed/hashnet" in hosts.run(name, ["sh", "-c", installed]).stdout
    status = "import ray; ray.init('auto', log_to_driver=False); print('nodes', len(ray.nodes()))"
    alive = lambda: "nodes 2" in hosts.run("head", ["python", "-c", status]).stdout  # noqa: E731
    wait_until(alive, 300)

    tunnel = hosts.popen(
        DESK, ["ray", "dashboard", str(file)], env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    api = {"RAY_API_SERVER_ADDRESS": "http://localhost:8265", "RAY_AUTH_MODE": "token"} | own
    wait_until(lambda: hosts.run(DESK, ["ray", "job", "list"], **api).returncode == 0, 120)
    settings = ["dataset=digits", "backbone=small_cnn", "n_bits=16", "stages=1", "first_epochs=1"]
    settings += ["run=s3://runs/launched", "num_workers=2", "cpus_per_worker=1", "placement=strict_spread"]
    words = ["ray", "job", "submit", "--working-dir", CHECKOUT, "--", "python", "jobs/train.py", *settings]
    done = hosts.run(DESK, [*words, "measure_rows=0", "device=cpu"], 600, **api)
    assert done.returncode == 0, done.stdout
    assert job_result(done.stdout)["cluster"]["nodes"] == 2
    os.killpg(tunnel.pid, 15)
    tunnel.wait()

    ray("down", "-y", str(file))
    for name in ("head", "worker"):
        wait_until(lambda name=name: not hosts.processes(name, "/raylet/raylet"), 60)
