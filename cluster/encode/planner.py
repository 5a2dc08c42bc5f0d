"""Decisions before encoding starts: which engine the workers have, how many actors, sound manifest parts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cluster.encode.pipeline import ACTOR_CPUS, DECODE_CPUS, use_one_thread
from cluster.runtime import Need, capacity, reraise_hashnet_error
from hashnet.data import Manifest
from hashnet.models import load_bundle

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


def engine_of_workers(engine: str, compile: bool | None, model_uri: str, modality: str, gpus: float) -> str:
    """The name of the engine that ``engine`` comes to on a worker; the driver's machine may differ."""
    if modality == "features" and not gpus and engine in ("auto", "cpu", "cpu-eager") and not compile:
        return "cpu-eager"  # the only one for feature rows on a CPU
    import ray

    # With a GPU no more CPU than an actor's, which is known to fit; without, compiling needs a whole CPU.
    cpus = ACTOR_CPUS if gpus else 1
    choose = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=3)(_start_and_choose)
    results = choose.remote(engine, compile, model_uri, modality)
    while not ray.wait([results], timeout=capacity.LINE_EVERY_S)[0]:
        size = capacity.describe({"CPU": cpus, "GPU": gpus})
        log.info("waiting for room: a worker of %s, to choose the engine", size)
    try:
        ray.get(next(results))
        name, why = ray.get(next(results))
    except ray.exceptions.RayTaskError as error:
        reraise_hashnet_error(error)
    log.info("engine: %s (%s)", name, why)
    return name


def _start_and_choose(engine: str, compile: bool | None, model_uri: str, modality: str) -> Iterator[Any]:
    """Task: yields None as soon as it runs, then the result of ``engine_here``, which may take a minute."""
    yield None
    yield engine_here(engine, compile, model_uri, modality)


def engine_here(engine: str, compile: bool | None, model_uri: str, modality: str) -> tuple[str, str]:
    """(name, reason): the engine on this machine. Where compiling was not requested, it is tried.

    A compiler may be installed without the headers it needs. The actors of this machine find what was
    compiled in its cache.
    """
    from hashnet.encoding import Engine, choose_engine

    compile = compile if engine in ("auto", "cpu") else None  # the names of engines say it themselves
    name, why = choose_engine(engine, modality, compile)
    if name != "cpu-compiled" or compile or engine == name:
        return name, why
    use_one_thread()
    tried = Engine(load_bundle(model_uri)[0], engine)
    return tried.name, tried.why


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


def verify_parts(manifest: Manifest, names: set[str]) -> None:
    """Compares the manifest parts that will be read with their sha256, one task per part."""
    import ray

    check = ray.remote(num_cpus=1)(Manifest.verify)
    parts = [part for part in manifest.parts if part.name in names]
    try:
        ray.get([check.remote(replace(manifest, parts=(part,))) for part in parts])
    except ray.exceptions.RayTaskError as error:
        reraise_hashnet_error(error)
