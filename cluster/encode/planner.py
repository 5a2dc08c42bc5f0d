"""Decisions before encoding starts: which engine the workers have, how many actors, sound manifest parts."""

from __future__ import annotations

import logging
from dataclasses import replace

from cluster.encode.pipeline import ACTOR_CPUS, DECODE_CPUS
from cluster.runtime import Need, capacity, connection, reraise_hashnet_error
from hashnet.data import Manifest

log = logging.getLogger(__name__)

ROWS_PER_NEW_ACTOR = 65_536  # about a minute of GPU time, as long as its node takes to start
MAX_NEW_ACTORS = 256  # on pools without a maximum; num_actors may request more


def requested_engine(device: str, compile: bool | None, begun: str | None) -> str:
    """The engine that the plan of a store names: where the request leaves it open, the one it was begun with.

    A device (auto, cpu) where neither decides: a worker then chooses. ``begun`` is the engine of a store
    that has shards already; a request that contradicts it is named exactly, and refused by the store.
    """
    on_cpu = {True: "cpu-compiled", False: "cpu-eager", None: "cpu"}[compile]
    if begun is None:
        return {"auto": "auto", "cpu": on_cpu, "cuda": "cuda"}[device]
    same_device = device in ("auto", begun.partition("-")[0])
    if same_device and (compile is None or begun in ("cuda", on_cpu)):
        return begun
    return "cuda" if device == "cuda" else on_cpu


def gpus_of_an_actor(engine: str, gpus_per_actor: float | None) -> float:
    """What one encoder actor takes of a GPU: 0 on the CPU, or where no node has a GPU or may get one."""
    if engine not in ("auto", "cuda") or not capacity.workers_that_fit({"GPU": 1}, include_addable=True):
        return 0
    return gpus_per_actor or 1


def engine_of_workers(engine: str, compile: bool | None, modality: str, gpus: float) -> str:
    """The name of the engine that ``engine`` comes to on the workers; on GPUs one of them is asked."""
    from hashnet.encoding import choose_engine  # imports torch

    if not gpus:
        return choose_engine("cpu" if engine == "auto" else engine, modality, compile)[0]
    import ray

    # No more CPU than an actor's, which is known to fit.
    choose = ray.remote(num_cpus=ACTOR_CPUS, num_gpus=gpus, max_retries=3)(choose_engine)
    choice = choose.remote(engine, modality, compile)
    while not ray.wait([choice], timeout=capacity.LINE_EVERY_S)[0]:
        log.info("waiting for room: a worker of %s, to choose the engine", capacity.describe({"GPU": gpus}))
    try:
        name, why = ray.get(choice)
    except ray.exceptions.RayTaskError as error:
        reraise_hashnet_error(error)
    log.info("engine: %s (%s)", name, why)
    return name


def reserve_actors(num_actors: int | None, gpus: float, rows: int) -> int:
    """How many actors encode ``rows``: ``num_actors``, else as many as the GPUs hold, else one per CPU.

    Checks the cluster's capacity, and waits for the first GPU where the autoscaler must add it; actors for
    GPUs that come later join the pool then. No more new GPUs are requested than the rows keep busy.
    """
    n_cpus = capacity.workers_that_fit({"CPU": 1}) or 1
    n_actors = num_actors or n_cpus
    if gpus and num_actors is None:
        here = capacity.workers_that_fit({"GPU": gpus})
        possible = capacity.workers_that_fit({"GPU": gpus}, include_addable=True)
        n_actors = max(here, min(possible, -(-rows // ROWS_PER_NEW_ACTOR), MAX_NEW_ACTORS), 1)
    per_actor = {"GPU": gpus, "CPU": ACTOR_CPUS} if gpus else {"CPU": ACTOR_CPUS}
    needs = [
        Need("decode", n_cpus, {"CPU": DECODE_CPUS}, at_least=1),
        Need(
            "encoder", n_actors, per_actor, at_least=1, fix="use device=cpu" if gpus else "lower num_actors"
        ),
    ]
    capacity.require("encode", needs)
    return n_actors


def n_committers(n_actors: int) -> int:
    """How many actors gather and commit codes: one per node, but no more than encode."""
    return max(1, min(n_actors, len(connection.node_names()) - 1))


def verify_parts(manifest: Manifest, names: set[str]) -> None:
    """Compares the manifest parts that will be read with their sha256, one task per part."""
    import ray

    check = ray.remote(num_cpus=1)(Manifest.verify)
    parts = [part for part in manifest.parts if part.name in names]
    try:
        ray.get([check.remote(replace(manifest, parts=(part,))) for part in parts])
        manifest.trust(names)
    except ray.exceptions.RayTaskError as error:
        reraise_hashnet_error(error)
