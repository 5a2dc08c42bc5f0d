"""The Serve application of a run: which deployments, how many replicas, what each reserves.

``application`` is what Serve's configuration files name, for `serve deploy` and Kubernetes' RayService:

    applications:
      - name: hashnet
        import_path: cluster.serve:application
        args: {run: /mnt/hashnet/runs/demo, port: 8010}      # the keys of jobs/serve.py

HTTP replicas listen on that port of their nodes, beside Serve's own proxy, which they do not need. The tokens
come from every node's environment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.runtime import Need, connection
from hashnet.errors import ConfigError
from hashnet.io import config as configs
from hashnet.server import Access, ServeConfig, ServedRun

# CPUs that Ray reserves for a process; the number of its threads is set separately.
WRITER_CPUS, WORK_CPUS = 0.05, 0.5
LOGGING = {"enable_access_log": False, "log_level": "WARNING"}  # the middleware logs requests
OPTIONS: dict[str, Any] = {
    "health_check_period_s": 2,
    "health_check_timeout_s": 20,
    "graceful_shutdown_timeout_s": 5,
    "logging_config": LOGGING,
}


def application(settings: dict[str, Any]) -> Any:
    """The Serve application; refused without HASHNET_TOKEN, since other machines can reach it."""
    config = configs.from_dict(ServeConfig, {"host": "0.0.0.0", **settings})
    return build(config, ServedRun.open(config), Access.from_environment(config.host))


def needs(config: ServeConfig, served: ServedRun) -> list[Need]:
    """What the cluster must have room for: Serve waits, without a message, until every replica is up."""
    listed = [
        Need("writer", 1, {"CPU": WRITER_CPUS}),
        Need("http", config.replicas, http_resources(config), fix="lower replicas"),
        *(
            Need(
                f"slice {number}",
                config.slice_replicas,
                slice_resources(config, served),
                fix="more, smaller slices, or fewer slice_replicas",
            )
            for number in range(config.slices or 0)
        ),
    ]
    if served.model is not None:
        resources = encoder_resources(config)
        listed.append(Need("encoder", config.encoder_replicas, resources, fix="lower encoder_replicas"))
    return listed


def http_resources(config: ServeConfig) -> dict[str, float]:
    """What Ray reserves for one HTTP process, which holds the index."""
    return _resources(config.threads, gpu=config.index_device == "cuda")


def slice_resources(config: ServeConfig, served: ServedRun) -> dict[str, float]:
    """What Ray reserves for one slice: memory for building it, too (ids twice, labels, rows read ahead)."""
    rows = -(-served.size // (config.slices or 1))
    return http_resources(config) | {"memory": rows * (served.n_bits // 8 + 64) + (256 << 20)}


def encoder_resources(config: ServeConfig) -> dict[str, float]:
    """What Ray reserves for one encoder process."""
    return _resources(config.threads, gpu=encoder_device(config) == "cuda")


def encoder_device(config: ServeConfig) -> str:
    """Where encoders run, cpu or cuda; device=auto is a GPU where the cluster has one."""
    if config.device != "auto":
        return config.device
    return "cuda" if connection.resources().get("GPU", 0) > 0 else "cpu"


def build(config: ServeConfig, served: ServedRun, access: Access) -> Any:
    """The application, ready for ``serve.run``."""
    from cluster.serve.replicas import EncoderReplica, HttpReplica, WriterReplica
    from cluster.serve.slices import SliceReplica, check_slices

    check_slices(config, served)
    if config.log_dir is not None:
        raise ConfigError("log_dir= is for `hashnet serve`: on Ray, requests are logged among Ray's logs")
    deployments: Any = (EncoderReplica, WriterReplica, HttpReplica, SliceReplica)
    encoder_class, writer_class, http_class, slice_class = deployments
    slices = [
        slice_class.options(
            name=f"Slice{number}",
            num_replicas=config.slice_replicas,
            max_ongoing_requests=1024,
            ray_actor_options=_actor(slice_resources(config, served)),
            **OPTIONS,
        ).bind(number, config, served)
        for number in range(config.slices or 0)
    ]
    encoder = None
    if served.model is not None:
        # What is reserved is what is used, whatever torch sees on the replica's node.
        placed = replace(config, device=encoder_device(config))
        encoder = encoder_class.options(
            **scaling(config.encoder_replicas, config.max_encoder_replicas, target=16),
            max_ongoing_requests=256,
            max_queued_requests=1024,
            ray_actor_options=_actor(encoder_resources(placed)),
            **OPTIONS,
        ).bind(placed, served)
    writer = writer_class.options(
        num_replicas=1, max_ongoing_requests=256, ray_actor_options=_actor({"CPU": WRITER_CPUS}), **OPTIONS
    ).bind(config, served, bool(access.write))
    return http_class.options(
        num_replicas=config.replicas, ray_actor_options=_actor(http_resources(config)), **OPTIONS
    ).bind(encoder, writer, slices, config, served, access)


def scaling(least: int, most: int | None, target: int) -> dict[str, Any]:
    """A fixed number of replicas, or bounds between which Serve chooses by the requests in flight."""
    if most is None or most == least:
        return {"num_replicas": least}
    bounds = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": target}
    return {"autoscaling_config": bounds}


def _resources(threads: int | None, gpu: bool) -> dict[str, float]:
    return {"CPU": float(threads or WORK_CPUS), **({"GPU": 0.5} if gpu else {})}


def _actor(resources: dict[str, float]) -> dict[str, float]:
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    return {names[name]: amount for name, amount in resources.items()}
