"""The Serve application of a run: which processes, how many, how large."""

from __future__ import annotations

from typing import Any

from cluster.runtime import Need, connection, run_name
from hashnet.server import Ground, ServeConfig, Tokens, digest, is_loopback, read_tokens

# What Ray books for a process; threads are set apart from it.
KEEPER_CPUS, SMALL_CPUS, WORK_CPUS = 0.05, 0.1, 0.5
LIFE: dict[str, Any] = {
    "health_check_period_s": 2,
    "health_check_timeout_s": 20,
    "graceful_shutdown_timeout_s": 5,
    "logging_config": {"enable_access_log": False, "log_level": "WARNING"},  # the guard keeps the request log
}


def hashed_tokens(host: str) -> Tokens:
    """The environment's tokens as digests; refuses to listen outwards without one."""
    read, write = read_tokens(host)
    return Tokens(digest(read), digest(write))


def needs(config: ServeConfig, ground: Ground) -> list[Need]:
    """What the cluster must have room for: Serve waits, without a word, until every replica is up."""
    wanted = [
        Need("keeper", 1, {"CPU": KEEPER_CPUS}),
        Need("http", config.http_replicas, {"CPU": SMALL_CPUS}, fix="lower http_replicas"),
        Need("index", config.index_replicas, size("index", config), fix="lower index_replicas"),
    ]
    if ground.paths["model"] is not None:
        resources = size("encoder", config)
        wanted.append(Need("encoder", config.encoder_replicas, resources, fix="lower encoder_replicas"))
    return wanted


def size(kind: str, config: ServeConfig) -> dict[str, float]:
    """What Ray books for one index or encoder process."""
    booked = {"CPU": float(config.threads or WORK_CPUS)}
    device = config.index_device if kind == "index" else config.encoder_device
    if device == "cuda" or (device == "auto" and connection.resources().get("GPU", 0) > 0):
        booked["GPU"] = 0.5
    return booked


def build(config: ServeConfig, ground: Ground, tokens: Tokens) -> Any:
    """The application, ready for ``serve.run``."""
    from cluster.serve.replicas import EncoderReplica, HttpReplica, IndexReplica, Keeper

    deployments: Any = (IndexReplica, EncoderReplica, Keeper, HttpReplica)
    of_index, of_encoder, of_keeper, of_http = deployments
    paths = ground.paths
    index = of_index.options(
        **scaling(config.index_replicas, config.max_index_replicas, target=32),
        max_ongoing_requests=1024,
        max_queued_requests=4096,
        ray_actor_options=_actor(size("index", config)),
        **LIFE,
    ).bind(
        paths["index"],
        config.engine,
        config.index_device,
        ground.model_sha256,
        config.follow_s,
        config.threads,
        run_name(config.run),
    )
    encoder = None
    if paths["model"] is not None:
        engine = "cpu-eager" if config.encoder_device == "cpu" else config.encoder_device
        encoder = of_encoder.options(
            **scaling(config.encoder_replicas, config.max_encoder_replicas, target=16),
            max_ongoing_requests=256,
            max_queued_requests=1024,
            ray_actor_options=_actor(size("encoder", config)),
            **LIFE,
        ).bind(paths["model"], engine, config.max_pixels, config.threads)
    keeper = of_keeper.options(
        num_replicas=1, max_ongoing_requests=256, ray_actor_options=_actor({"CPU": KEEPER_CPUS}), **LIFE
    ).bind(paths["index"], ground.model_sha256)
    local_only = is_loopback(config.host) and not tokens.read
    return of_http.options(
        num_replicas=config.http_replicas,
        max_ongoing_requests=4 * config.max_inflight,  # the guard refuses before Serve queues
        max_queued_requests=4 * config.max_inflight,
        ray_actor_options=_actor({"CPU": SMALL_CPUS}),
        **LIFE,
    ).bind(index, encoder, keeper, paths, ground.fixed, config.limits, tokens, local_only)


def scaling(least: int, most: int, target: int) -> dict[str, Any]:
    """A fixed number of replicas, or bounds between which Serve chooses by the requests under way."""
    if not most or most == least:
        return {"num_replicas": least}
    bounds = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": target}
    return {"autoscaling_config": bounds}


def _actor(booked: dict[str, float]) -> dict[str, Any]:
    return {"num_cpus": booked["CPU"], **({"num_gpus": booked["GPU"]} if "GPU" in booked else {})}
