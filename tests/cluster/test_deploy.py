"""ray_cluster.yaml, the Kubernetes files and the dashboard: checked without a cloud."""

import importlib
import json
import re
import shlex
import tomllib
from decimal import Decimal

import pytest
import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.docker import docker_start_cmds
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

import hashnet
from cluster.encode import pipeline
from cluster.encode.job import EncodeConfig
from cluster.runtime import capacity, connection, telemetry
from cluster.runtime.job import read_settings
from hashnet.io import config as configs
from hashnet.server.settings import ServeConfig
from hashnet.training.train_config import TrainConfig

KUBERNETES = ("cluster.yaml", "encode.yaml", "serve.yaml", "train.yaml")


@pytest.fixture(scope="module")
def launcher(repo):
    return yaml.safe_load((repo / "ray_cluster.yaml").read_text())


def test_ray_accepts_the_launcher_file(launcher):
    ready = prepare_config(launcher)
    validate_config(ready)
    broken = prepare_config({**launcher, "idle_timeout_hours": 1})
    with pytest.raises(Exception, match="idle_timeout_hours"):
        validate_config(broken)


def test_the_head_takes_no_work_and_gpus_come_from_zero_on_spot(launcher):
    kinds = launcher["available_node_types"]
    head, cpu, gpu = kinds[launcher["head_node_type"]], kinds["cpu"], kinds["gpu"]
    assert head["resources"] == {"CPU": 0, "GPU": 0}
    assert "GPU" not in cpu["resources"]
    assert gpu["min_workers"] == 0
    assert gpu["resources"]["GPU"] >= 1
    assert gpu["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert [kind["labels"][capacity.POOL] for kind in (head, cpu, gpu)] == ["head", "cpu", "gpu"]


@pytest.fixture
def ray_up_types(launcher, tmp_path, monkeypatch):
    """The node types in the file that `ray up` leaves on the head."""
    left = tmp_path / "bootstrap.yaml"
    left.write_text(yaml.safe_dump(prepare_config(launcher)))
    monkeypatch.setattr(capacity, "BOOTSTRAP", str(left))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.delenv(capacity.NODE_TYPES, raising=False)
    return capacity._node_types()


def test_the_types_that_ray_up_leaves_on_the_head(ray_up_types):
    assert ray_up_types == [("cpu", {"CPU": 16}, 8), ("gpu", {"CPU": 8, "GPU": 1}, 8)]


def test_every_machine_starts_from_an_image_that_is_named(launcher):
    # Left to itself, Ray takes one whose driver is too old for the CUDA of constraints.txt.
    images = [kind["node_config"]["ImageId"] for kind in launcher["available_node_types"].values()]
    assert len(images) == 3
    assert all(re.fullmatch(r"ami-[0-9a-f]{17}", image) for image in images)


def test_drivers_on_worker_nodes_know_what_the_autoscaler_may_add(launcher, ray_up_types, monkeypatch):
    docker = launcher["docker"]
    options = docker["run_options"] + docker["worker_run_options"]
    command = docker_start_cmds(
        "ubuntu", docker["image"], {}, "hashnet", options, "hashnet", "/home/ray", "docker"
    )
    told = [word for word in shlex.split(command) if word.startswith(f"{capacity.NODE_TYPES}=")]
    (word,) = told
    monkeypatch.setenv(*word.split("=", 1))
    assert capacity._node_types() == ray_up_types


def test_the_plan_in_the_guide_is_what_a_new_cluster_prints(
    launcher, ray_up_types, repo, monkeypatch, caplog
):
    caplog.set_level("INFO", "cluster.runtime.capacity")
    kinds = launcher["available_node_types"]
    now = [capacity.Node("10.0.0.4", {}, is_head=True), capacity.Node("10.0.0.17", kinds["cpu"]["resources"])]
    groups = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(groups, "placement_group", lambda bundles, strategy: None)
    monkeypatch.setattr(connection, "connect", lambda: None)
    monkeypatch.setattr(capacity, "nodes", lambda: now)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    gpu = capacity.Node("10.0.0.23", kinds["gpu"]["resources"])
    monkeypatch.setattr(capacity.time, "sleep", lambda seconds: now.append(gpu))
    pipeline.reserve_actors(None, pipeline.gpus_of_an_actor("auto", None), rows=1_000_000)
    printed = "".join(f"    {line}\n" for line in caplog.messages)
    assert printed in (repo / "docs/operate.md").read_text()


def test_the_launcher_copies_what_pip_needs_and_not_the_whole_checkout(launcher, repo):
    inside = "/home/ray/hashnet/"
    copied = {
        at.removeprefix(inside): mine for at, mine in launcher["file_mounts"].items() if at.startswith(inside)
    }
    assert all(at == mine and (repo / mine).exists() for at, mine in copied.items())
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]}
    assert set(copied) == needed | {"hashnet"}
    copy, install = launcher["setup_commands"]
    assert copy.endswith(" cp -r /home/ray/hashnet /tmp/hashnet")
    assert '-c /tmp/hashnet/constraints.txt "/tmp/hashnet[gpu' in install
    assert launcher["initialization_commands"][-1] == "sudo chown 1000:100 /mnt/hashnet"


def test_the_launcher_keeps_strangers_out(launcher, repo):
    assert "-e RAY_AUTH_MODE=token" in launcher["docker"]["run_options"]
    assert "/home/ray/.ray/auth_token" in launcher["file_mounts"]
    (start,) = [c for c in launcher["head_start_ray_commands"] if "ray start" in c]
    assert "--dashboard-host=127.0.0.1" in start
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start
    text = (repo / "ray_cluster.yaml").read_text()
    assert not re.search(r"AKIA|aws_secret|password", text)


def test_images_carry_the_tested_ray_and_python(launcher, repo):
    pins = [Requirement(line) for line in _lines(repo / "constraints.txt")]
    (ray,) = [str(pin.specifier).removeprefix("==") for pin in pins if pin.name == "ray"]
    kinds = launcher["available_node_types"].values()
    images = [launcher["docker"]["image"], *(k["docker"]["worker_image"] for k in kinds if "docker" in k)]
    images.append((repo / "cluster/deploy/kubernetes/Dockerfile").read_text().split("FROM ")[1].split()[0])
    (wanted,) = re.findall(r'"ray\[[^]]*\]==([\d.]+)\.\*"', (repo / "pyproject.toml").read_text())
    assert ray.startswith(f"{wanted}.")
    for image in images:
        assert re.fullmatch(rf"rayproject/ray:{re.escape(ray)}-py311-(cpu|gpu)", image)
    for name in KUBERNETES:
        assert _ray_cluster(repo, name)["rayVersion"] == ray


def _lines(path):
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def _document(repo, name):
    document, *services = yaml.safe_load_all((repo / "cluster/deploy/kubernetes" / name).read_text())
    assert [service["kind"] for service in services] == (["Service"] if name == "serve.yaml" else [])
    return document


def _ray_cluster(repo, name):
    """The RayClusterSpec inside any of the three kinds."""
    spec = _document(repo, name)["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


@pytest.mark.parametrize("name", KUBERNETES)
def test_kuberay_finds_what_it_requires(repo, name):
    document = _document(repo, name)
    kind = {"cluster.yaml": "RayCluster", "serve.yaml": "RayService"}.get(name, "RayJob")
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", kind)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,46}[a-z0-9])?", document["metadata"]["name"])
    spec = _ray_cluster(repo, name)
    assert spec["authOptions"] == {"mode": "token"}
    head = spec["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    groups = spec["workerGroupSpecs"]
    assert len({group["groupName"] for group in groups}) == len(groups)
    for group in groups:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in (head, *groups):
        _check_pod(group["template"])


@pytest.mark.parametrize("name", KUBERNETES)
def test_every_pod_hides_gpus_from_processes_without_one(repo, name):
    """Serve's processes are started by its controller, not by a driver that could say so."""
    spec = _ray_cluster(repo, name)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        set_there = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert connection.HIDE_GPUS.items() <= set_there.items()


def test_every_container_of_the_launcher_hides_them_too(launcher):
    ((name, value),) = connection.HIDE_GPUS.items()
    assert f"-e {name}={value}" in launcher["docker"]["run_options"]


@pytest.mark.parametrize("name", KUBERNETES)
def test_rays_own_autoscaler_reads_the_cluster(repo, name, monkeypatch):
    spec = _ray_cluster(repo, name)
    custom = {"metadata": {"name": "hashnet", "namespace": "default"}, "spec": spec}
    derived = autoscaling_config._derive_autoscaling_config_from_ray_cr(custom)  # validates it, too
    kinds = derived["available_node_types"]
    assert kinds["headgroup"]["resources"]["CPU"] == 0
    assert kinds["cpu"]["labels"] == {capacity.POOL: "cpu"}
    if name != "serve.yaml":
        assert kinds["gpu"]["resources"]["GPU"] == 1
        assert kinds["gpu"]["labels"][capacity.POOL] == "gpu"
    # What we tell jobs about the autoscaler, wherever their driver runs, is what the autoscaler is told.
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        env = {e["name"]: e for e in group["template"]["spec"]["containers"][0]["env"]}
        monkeypatch.setenv(capacity.NODE_TYPES, env[capacity.NODE_TYPES]["value"])
        told = capacity._node_types()
        assert {kind for kind, _, _ in told} == set(kinds) - {"headgroup"}
        for kind, resources, most in told:
            assert most == kinds[kind]["max_workers"]
            assert {key: kinds[kind]["resources"][key] for key in resources} == resources


@pytest.mark.parametrize("name", KUBERNETES)
def test_gpus_come_from_zero_on_spot_or_not_at_all(repo, name):
    groups = [g for g in _ray_cluster(repo, name)["workerGroupSpecs"] if g["groupName"] == "gpu"]
    # An encoder that takes a GPU "where there is one" never asks for the first: a server would not use them.
    assert bool(groups) == (name != "serve.yaml")
    for group in groups:
        assert group["minReplicas"] == 0
        assert group["template"]["spec"]["nodeSelector"]


POD_KEYS = {
    "containers",
    "volumes",
    "tolerations",
    "nodeSelector",
    "affinity",
    "serviceAccountName",
    "securityContext",
}
CONTAINER_KEYS = {
    "name",
    "image",
    "ports",
    "readinessProbe",
    "env",
    "resources",
    "volumeMounts",
    "command",
    "args",
    "lifecycle",
}


def _check_pod(template):
    """A pod template Kubernetes could take: known keys, quantities that parse, mounts that exist."""
    pod = template["spec"]
    assert set(pod) <= POD_KEYS
    assert pod["securityContext"]["fsGroup"] == 100  # the images' user is ray, 1000:100
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    for container in pod["containers"]:
        assert set(container) <= CONTAINER_KEYS
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", container["name"])
        assert container["image"]
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        for quantity in (*requests.values(), *limits.values()):
            assert _quantity(quantity) > 0
        assert requests == limits  # guaranteed: not evicted for what it asked for
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) <= set(volumes)
        assert mounts["/dev/shm"] == "shm"
        assert _quantity(volumes["shm"]["emptyDir"]["sizeLimit"]) < _quantity(limits["memory"]) / 2
        for entry in container.get("env", []):
            assert set(entry) in ({"name", "value"}, {"name", "valueFrom"})
            assert isinstance(entry.get("value", ""), str)
        for port in container.get("ports", []):
            assert 0 < port["containerPort"] < 65536
            assert len(port["name"]) <= 15


def _quantity(text):
    number, unit = re.fullmatch(r"([0-9.]+)(m|Ki|Mi|Gi|Ti|k|M|G|T)?", str(text)).groups()
    powers = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4}
    return Decimal(number) * Decimal(1024) ** powers.get(unit, 0)


@pytest.mark.parametrize("name", ["train.yaml", "encode.yaml"])
def test_ray_jobs_go_on_after_a_failure_and_clean_up(repo, name):
    spec = _document(repo, name)["spec"]
    assert spec["backoffLimit"] > 0
    assert spec["shutdownAfterJobFinishes"] is True
    words = spec["entrypoint"].split()
    assert words[0] == "python"
    inside = words[1].removeprefix("/home/ray/hashnet/")
    assert (repo / inside).exists()
    for word in words:
        if "configs/" in word:
            assert (repo / word.removeprefix("/home/ray/hashnet/")).exists()
    assert any(word.startswith("run=/mnt/hashnet/") for word in words)
    settings = {"train.yaml": TrainConfig, "encode.yaml": EncodeConfig}[name]
    read_settings(settings, [word.replace("/home/ray/hashnet", str(repo)) for word in words[2:]])


def test_serve_reads_the_rayservice_and_finds_the_application(repo):
    spec = _document(repo, "serve.yaml")["spec"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    (application,) = config.applications
    module, name = application.import_path.split(":")
    assert callable(getattr(importlib.import_module(module), name))
    configs.from_dict(ServeConfig, application.args)  # raises on a key jobs/serve.py does not know
    workers = spec["rayClusterConfig"]["workerGroupSpecs"]
    for pod in (spec["rayClusterConfig"]["headGroupSpec"], *workers):  # any node may build the application
        (container,) = pod["template"]["spec"]["containers"]
        assert "HASHNET_TOKEN" in {entry["name"] for entry in container["env"]}
    _, service = yaml.safe_load_all((repo / "cluster/deploy/kubernetes/serve.yaml").read_text())
    (worker,) = workers
    (container,) = worker["template"]["spec"]["containers"]
    (port,) = service["spec"]["ports"]  # reaches the HTTP replicas, one per worker pod
    assert {"name": port["targetPort"], "containerPort": application.args["port"]} in container["ports"]
    assert service["spec"]["selector"].items() <= worker["template"]["metadata"]["labels"].items()
    assert worker["replicas"] == application.args["replicas"]
    (http,) = application.deployments
    assert (http.name, http.max_replicas_per_node) == ("HttpReplica", 1)


def test_the_rest_of_the_kubernetes_files_parse(repo):
    kinds = {name: _document(repo, name)["kind"] for name in ("storage.yaml", "network.yaml", "monitor.yaml")}
    assert kinds == {
        "storage.yaml": "PersistentVolumeClaim",
        "network.yaml": "NetworkPolicy",
        "monitor.yaml": "PodMonitor",
    }
    assert _document(repo, "monitor.yaml")["metadata"]["labels"] == {"release": "prometheus"}
    claim = _document(repo, "storage.yaml")
    for name in KUBERNETES:
        pod = _ray_cluster(repo, name)["headGroupSpec"]["template"]["spec"]
        claims = [
            v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v
        ]
        assert claims == [claim["metadata"]["name"]]
        assert pod["containers"][0]["image"] == f"hashnet:{hashnet.__version__}"


def test_the_network_lets_in_submitters_and_prometheus_to_its_port_alone(repo):
    rules = _document(repo, "network.yaml")["spec"]["ingress"]
    pods = [peer["podSelector"] for rule in rules for peer in rule["from"] if "podSelector" in peer]
    (names,) = [pod["matchExpressions"][0]["values"] for pod in pods if "matchExpressions" in pod]
    assert names == [_document(repo, name)["metadata"]["name"] for name in ("train.yaml", "encode.yaml")]
    (prometheus,) = [rule for rule in rules if "ports" in rule]
    (endpoint,) = _document(repo, "monitor.yaml")["spec"]["podMetricsEndpoints"]
    for name in KUBERNETES:
        spec = _ray_cluster(repo, name)
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            ports = {
                p["name"]: p["containerPort"] for p in group["template"]["spec"]["containers"][0]["ports"]
            }
            assert [port["port"] for port in prometheus["ports"]] == [ports[endpoint["port"]]]


def test_the_dashboard_shows_every_metric_and_no_other(repo):
    board = json.loads((repo / "cluster/deploy/grafana/hashnet.json").read_text())
    expressions = [t["expr"] for panel in board["panels"] for t in panel.get("targets", [])]
    shown = set(re.findall(r"ray_(hashnet_\w+?)(?:_bucket)?(?=[{\s)\[])", " ".join(expressions) + " "))
    ours = {about.full_name(name) for name, about in telemetry.METRICS.items()}
    assert shown == ours
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
