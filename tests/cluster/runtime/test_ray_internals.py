"""What is read from Ray's private parts; no Ray is started."""

import io
import json
import os
import sys
from types import SimpleNamespace

import ray

from cluster.runtime import ray_internals  # which also sends events to Ray's log folder
from hashnet.io import events


def test_events_before_ray_is_there_do_not_keep_later_ones_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    events.event("too early", run="demo")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr("ray._private.worker._global_node", node)
    for shard in ("codes-00000", "codes-00001"):
        events.event("shard committed", run="demo", shard=shard)
    written = (tmp_path / f"hashnet-{os.getpid()}.jsonl").read_text().splitlines()
    assert [json.loads(line)["shard"] for line in written] == ["codes-00000", "codes-00001"]


def test_what_workers_print_is_shown_and_what_ray_says_is_recorded(monkeypatch, capsys):
    from ray._private import worker

    monkeypatch.setattr(worker, "print_worker_logs", worker.print_worker_logs)  # put back at the end
    log = io.StringIO()
    ray_internals.record_output(log)
    about = {
        "pid": 7,
        "actor_name": "RayTrainWorker",
        "ip": "127.0.0.1",
        "localhost": "127.0.0.1",
        "job": "01",
    }
    for is_err, line in ((False, "train: 20/100 steps"), (True, "Traceback (most recent call last):")):
        worker.print_to_stdstream({**about, "is_err": is_err, "lines": [line]}, ignore_prefix=False)
    died = {"pid": "raylet", "is_err": False, "lines": ["Raylet is terminated.\n - bytes in use: 2348"]}
    worker.print_to_stdstream(died, ignore_prefix=False)
    worker.print_to_stdstream({"pid": None, "is_err": False, "lines": []}, ignore_prefix=False)
    worker.print_worker_logs({}, sys.stdout)  # what Ray hands on, many times a second, when its head is gone
    assert tuple(capsys.readouterr()) == ("", "train: 20/100 steps\n")
    recorded = log.getvalue().splitlines()
    assert recorded[0] == "(RayTrainWorker pid=7) Traceback (most recent call last):"
    assert recorded[1:] == ["( pid=raylet) Raylet is terminated.", " - bytes in use: 2348"]


def test_gloo_listens_on_the_address_that_ray_uses(monkeypatch):
    # Debian's /etc/hosts maps the host's name to 127.0.1.1, where gloo would listen by default.
    address = SimpleNamespace(address="10.1.2.3")
    interfaces = {"lo": [SimpleNamespace(address="127.0.0.1")], "ens5": [address]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.1.2.3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # put back at the end
    del os.environ["GLOO_SOCKET_IFNAME"]
    ray_internals.listen_on_node_address()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ens5"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    ray_internals.listen_on_node_address()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"  # a user's own
