"""Before encoding starts: which engine the workers have, how many actors, and sound manifest parts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cluster.encode.stages import ACTOR_CPUS, DECODE_CPUS, on_one_thread
from cluster.runtime import Need, capacity, reraise_hashnet_error
from hashnet.data import Manifest
from hashnet.models import load_bundle

log = logging.getLogger(__name__)

ROWS_PER_NEW_ACTOR = 65_536  # about a minute of a GPU, in which its node comes up
MOST_NEW_ACTORS = 256  # on pools without a maximum; num_actors asks for more


def gpus_wanted(engine: str, asked: float | None) -> float:
    """GPUs of an encoder actor: as asked, else one where the cluster has a GPU or may get one."""
    if asked is not None:
        return asked
    if engine not in ("auto", "cuda"):
        return 0
    return 1 if capacity.workers_that_fit({"GPU": 1}, include_addable=True) else 0


def settle_engine(engine: str, model_uri: str, modality: str, gpus: float) -> str:
    """What ``engine`` comes to on a worker's machine; asked there, since the driver's may differ."""
    if modality == "features" and not gpus and engine in ("auto", "cpu-eager"):
        return "cpu-eager"  # nothing to ask for
    import ray

    # Beside a GPU no more than an actor's share, for which the plan has found room; a trial needs a CPU.
    cpus = ACTOR_CPUS if gpus else 1
    ask = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=3)(_begin_and_answer)
    answers = ask.remote(engine, model_uri, modality)
    while not ray.wait([answers], timeout=capacity.LINE_EVERY_S)[0]:
        wanted = capacity.describe({"CPU": cpus, "GPU": gpus})
        log.info("waiting for room: a worker of %s, to settle the engine", wanted)
    try:
        ray.get(next(answers))
        name, why = ray.get(next(answers))
    except ray.exceptions.RayTaskError as error:
        reraise_hashnet_error(error)
    log.info("engine: %s (%s)", name, why)
    return name


def _begin_and_answer(engine: str, model_uri: str, modality: str) -> Iterator[Any]:
    """What ``engine_here`` says, after a word that there is room to find out, which may take a minute."""
    yield None
    yield engine_here(engine, model_uri, modality)


def engine_here(engine: str, model_uri: str, modality: str) -> tuple[str, str]:
    """An engine's name on this machine and the reason. ``auto`` compiles the model to see whether that works.

    A compiler may be there and a header not; what it compiled, the actors of this machine find in its cache.
    """
    from hashnet.encoding import Engine, choose_engine

    name, why = choose_engine(engine, modality)
    if engine != "auto" or name != "cpu-compiled":
        return name, why
    on_one_thread()
    tried = Engine(load_bundle(model_uri)[0], engine)
    return tried.name, tried.why


def place(num_actors: int | None, gpus: float, rows: int) -> int:
    """How many encoder actors run for ``rows``: as asked, else as many as the GPUs hold, or one a CPU.

    Says what goes where, and waits for the first GPU where an autoscaler must bring it; actors for
    GPUs that come later join the pool then. No more GPUs are asked for than the rows keep busy.
    """
    n_cpus = capacity.workers_that_fit({"CPU": 1}) or 1
    n_actors = num_actors or n_cpus
    if gpus and num_actors is None:
        here, all_of_them = (
            capacity.workers_that_fit({"GPU": gpus}, include_addable=add) for add in (False, True)
        )
        n_actors = max(here, min(all_of_them, -(-rows // ROWS_PER_NEW_ACTOR), MOST_NEW_ACTORS), 1)
    per_actor = {"GPU": gpus, "CPU": ACTOR_CPUS} if gpus else {"CPU": ACTOR_CPUS}
    needs = [
        Need("decode", n_cpus, {"CPU": DECODE_CPUS}, at_least=1),
        Need("encoder", n_actors, per_actor, at_least=1, fix="lower num_actors"),
    ]
    capacity.require("encode", needs)
    return n_actors


def verify_parts(manifest: Manifest, names: set[str]) -> None:
    """Compares the manifest parts that will be read with their sha256, one task a part."""
    import ray

    check = ray.remote(num_cpus=1)(Manifest.verify)
    parts = [part for part in manifest.parts if part.name in names]
    try:
        ray.get([check.remote(replace(manifest, parts=(part,))) for part in parts])
    except ray.exceptions.RayTaskError as error:
        reraise_hashnet_error(error)
