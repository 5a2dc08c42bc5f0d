"""Encoding against loops by hand: pictures and features per second, as ratios of the same run.

    python tests/bench/encoding.py pictures [--backbone alexnet] [--images 8000] [--cores N]
    python tests/bench/encoding.py features [--rows 1300000] [--cores N]
    python tests/bench/encoding.py cores [--backbone alexnet] [--images 4000]

Prints one JSON row per case; every case runs in a process of its own, and the peers run before and after
the pipeline. ``pictures`` takes JPEGs of 500 x 375. Peers: ``tight loop``, one process with decoding
threads and a forward that never waits for them, same model, same engine; ``DataLoader``, what a user
would write (PIL, torchvision transforms, eager, a worker per core); ``Daft``, its own download, decoding
and resize, our engine in a class of its own, codes into Parquet (left out where it is not installed: `make
peers`). ``features`` compares with one process that reads the same Parquet and writes the same codes.
``cores`` measures pictures on one core and on two: decoding alone, and the whole way to codes.

Everything that is measured has ``--cores`` of the machine's cores, all of them if left out: threads, workers
and actors are as many, and the system lets none of them run elsewhere.

Compiling and loading are outside every timing: the pipeline's rate, and Daft's, is taken between 25 % and
80 % of its rows, when all queues are as full as they get; ``rate_with_start`` is rows over the whole time.
``cpu_ms`` is processor time a picture, Ray's own processes included. ``ratio_to_least_cpu_time`` sets it
against one thread that only decodes and encodes: no loop can beat 1, and it holds where others use the
machine, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from encoding_memory import N_BITS, N_FEATURES, make_features  # puts the checkout onto the path, too

N_FILES = 400  # different JPEGs; the manifest names them again and again


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def on_cores(n: int | None) -> Iterator[None]:
    """What starts inside runs on the first ``n`` cores alone; None: on all."""
    all_of_them = os.sched_getaffinity(0)
    if n is not None and n > len(all_of_them):
        raise SystemExit(f"{n} cores were requested, and there are {len(all_of_them)}")
    os.sched_setaffinity(0, sorted(all_of_them)[:n])
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_of_them)


def make_pictures(folder: Path, n_images: int, backbone: str, engine: str) -> None:
    """JPEGs with the detail of photographs (about 60 kB each), a manifest of them, and a random model."""
    import torch
    from PIL import Image

    from hashnet.data.writer import rows_of_uris, write_manifest
    from hashnet.models.bundle import save_bundle
    from hashnet.models.hash_model import build_model

    rng = np.random.default_rng(0)
    for i in range(N_FILES):
        coarse = Image.fromarray(rng.integers(0, 256, size=(24, 32, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)) + rng.normal(
            0, 12, (375, 500, 3)
        )
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i:04d}.jpg", quality=85)
    uris = pa.array([str(folder / f"{i % N_FILES:04d}.jpg") for i in range(n_images)])
    write_manifest(str(folder / "manifest.parquet"), rows_of_uris(uris), np.full(n_images, 4, np.uint8))
    torch.manual_seed(0)
    save_bundle(str(folder / "model"), build_model(backbone, 48))


def pipeline(folder: Path, engine: str) -> dict[str, float]:
    """The job itself; rate between 25 % and 80 % of the rows, and rows over the whole time."""
    import cluster.encode.pipeline as stages
    from cluster.encode.job import EncodeConfig, encode_database
    from cluster.runtime import connection

    seen: list[tuple[float, int]] = []

    def watched(
        run: Callable[..., Iterator[Any]], rows_of: Callable[[Any], int]
    ) -> Callable[..., Iterator[Any]]:
        def inner(*arguments: Any) -> Iterator[Any]:
            for item in run(*arguments):
                seen.append((time.perf_counter(), rows_of(item)))
                yield item

        return inner

    stages.run_pictures = watched(stages.run_pictures, lambda step: step.rows)  # type: ignore[assignment]
    stages.run_features = watched(stages.run_features, lambda step: step.rows)  # type: ignore[assignment]
    connection.connect(num_cpus=n_cores(), object_store_memory=500_000_000)
    busy = CpuClock()
    started = time.perf_counter()
    compiled = {"cpu-compiled": True, "cpu-eager": False}.get(engine)
    out = str(folder / f"codes-{os.getpid()}")
    actors = n_cores()  # without a number, few rows are encoded without Ray
    encode_database(EncodeConfig(run=str(folder), device="cpu", compile=compiled, out=out, num_actors=actors))
    whole = time.perf_counter() - started
    begin, end, rows = in_the_middle(seen)
    return {
        "rate": rows / (end - begin),
        "cpu_ms": (busy.at(end) - busy.at(begin)) / rows * 1000,
        "rate_with_start": sum(n for _, n in seen) / whole,
    }


def in_the_middle(seen: list[tuple[float, int]]) -> tuple[float, float, int]:
    """(begin, end, rows between them) from 25 % to 80 % of the rows; ``seen``: (moment, rows done then)."""
    done = np.cumsum([n for _, n in seen])
    first, last = np.searchsorted(done, 0.25 * done[-1]), np.searchsorted(done, 0.8 * done[-1])
    return seen[first][0], seen[last][0], int(done[last] - done[first])


class CpuClock:
    """Processor seconds of this process and all below it, sampled while something runs."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        import psutil

        while True:
            total = 0.0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    times = process.cpu_times()
                    total += times.user + times.system
                except psutil.Error:  # it ended meanwhile
                    continue
            self.samples.append((time.perf_counter(), total))
            time.sleep(0.5)

    def at(self, moment: float) -> float:
        times, totals = zip(*self.samples, strict=True)
        return float(np.interp(moment, times, totals))


def tight_loop(folder: Path, engine: str, n_images: int) -> dict[str, float]:
    """One process: two threads decode ahead while the model runs on what is decoded."""
    from hashnet.encoding.encoder import Encoder

    encoder = Encoder.load(str(folder / "model"), engine=engine)
    paths = [folder / f"{i % N_FILES:04d}.jpg" for i in range(n_images)]
    rows = encoder.batch_rows

    def decode(start: int) -> np.ndarray:
        return np.stack([encoder.preprocess.eval(path.read_bytes()) for path in paths[start : start + rows]])

    encoder.encode(decode(0))
    starts = iter(range(0, n_images, rows))
    started, busy = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(n_cores()) as pool:
        ahead = deque(pool.submit(decode, start) for start, _ in zip(starts, range(6), strict=False))
        while ahead:
            pixels = ahead.popleft().result()
            if (start := next(starts, None)) is not None:
                ahead.append(pool.submit(decode, start))
            encoder.encode(pixels)
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    return {"rate": n_images / seconds, "cpu_ms": busy / n_images * 1000}


def decoding(folder: Path, n_images: int) -> dict[str, float]:
    """Files to pixels by a thread per core, as an encoder's decode tasks make them."""
    from hashnet.models.bundle import load_bundle

    preprocess = load_bundle(str(folder / "model"))[1].preprocess
    paths = [folder / f"{i % N_FILES:04d}.jpg" for i in range(n_images)]

    def decode(some: Sequence[Path]) -> None:
        preprocess.eval_many([path.read_bytes() for path in some], threads=n_cores())

    decode(paths[:32])
    started = time.perf_counter()
    for start in range(0, n_images, 32):
        decode(paths[start : start + 32])
    return {"rate": n_images / (time.perf_counter() - started)}


def one_thread(folder: Path, engine: str, n_images: int) -> dict[str, float]:
    """Processor time a picture when one thread does everything: nothing waits, spins or is moved."""
    import torch

    from hashnet.encoding.encoder import Encoder

    torch.set_num_threads(1)
    encoder = Encoder.load(str(folder / "model"), engine=engine)
    paths = [folder / f"{i % N_FILES:04d}.jpg" for i in range(n_images)]
    encoder.encode(paths[: encoder.batch_rows])
    busy = time.process_time()
    for start in range(0, n_images, encoder.batch_rows):
        encoder.encode(paths[start : start + encoder.batch_rows])
    return {"cpu_ms": (time.process_time() - busy) / n_images * 1000}


def engines(folder: Path) -> dict[str, Any]:
    """Processor ms per picture of the model alone on one thread, in turns; and bits that differ from eager's.

    ``seconds_to_start`` is processor time, the compiler's included, until an engine has taken its first row.
    """
    import torch

    from hashnet.encoding.encoder import Encoder

    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # nothing compiled before
    paths = [folder / f"{i:04d}.jpg" for i in range(N_FILES)]
    encoders, logits, row = {}, {}, {}
    for name in ("eager", "fused", "compiled"):
        before = sum(os.times()[:4])
        encoders[name] = Encoder.load(str(folder / "model"), engine=f"cpu-{name}")
        encoders[name].encode(paths[:1])
        row[name] = {"seconds_to_start": round(sum(os.times()[:4]) - before, 1), "cpu_ms": np.inf}
        logits[name] = encoders[name].logits(paths)
        flipped = (logits[name] >= 0) != (logits["eager"] >= 0)
        row[name] |= {
            "bits_that_differ": int(flipped.sum()),
            "largest_logit_among_them": float(np.abs(logits["eager"][flipped]).max(initial=0)),
        }
    pixels = encoders["eager"].prepare(paths[: 2 * encoders["eager"].batch_rows])
    for _ in range(5):
        for name, encoder in encoders.items():
            busy = time.process_time()
            encoder.encode(pixels)
            cpu_ms = (time.process_time() - busy) / len(pixels) * 1000
            row[name]["cpu_ms"] = min(row[name]["cpu_ms"], round(cpu_ms, 2))
    return {"bits": logits["eager"].size, **row}


class _Pictures:
    """A torch data set as in most projects: PIL, then torchvision's transforms."""

    def __init__(self, folder: Path, n_images: int, resize: int, crop: int) -> None:
        from torchvision import transforms

        self.folder, self.n_images = folder, n_images
        self.transform = transforms.Compose(
            [transforms.Resize(resize), transforms.CenterCrop(crop), transforms.PILToTensor()]
        )

    def __len__(self) -> int:
        return self.n_images

    def __getitem__(self, i: int) -> Any:
        from PIL import Image

        with Image.open(self.folder / f"{i % N_FILES:04d}.jpg") as picture:
            return self.transform(picture.convert("RGB"))


def data_loader(folder: Path, n_images: int, whole: bool = True) -> dict[str, float]:
    """A DataLoader with a worker process a core, eager, contiguous tensors; not ``whole``: decoding alone."""
    import torch

    from hashnet.codes import pack_signs
    from hashnet.models.bundle import load_bundle

    model, info = load_bundle(str(folder / "model"))
    data = _Pictures(folder, n_images, info.preprocess.resize, info.preprocess.crop)
    loader = torch.utils.data.DataLoader(data, batch_size=32, num_workers=n_cores())
    batches = iter(loader)
    with torch.inference_mode():
        pack_signs(model(next(batches)))  # workers are up from here on
        started = time.perf_counter()
        n = sum(len(pack_signs(model(batch)) if whole else batch) for batch in batches)
    return {"rate": n / (time.perf_counter() - started)}


def daft(folder: Path, engine: str, n_images: int, whole: bool = True) -> dict[str, Any]:
    """Daft reads, decodes and resizes on all cores; our engine crops and encodes; Daft writes Parquet.

    The engine is loaded once and shares the process, which spares Daft copies of the pixels. Not ``whole``:
    pictures are cropped, and that is all.
    """
    import tests.bench.peers  # noqa: F401  (where Daft is installed)

    os.environ["DAFT_ANALYTICS_ENABLED"] = "false"
    try:
        import daft
        from daft import functions
    except ImportError as error:
        return {"missing": f"not installed: {error}"}
    from hashnet.models.bundle import load_bundle

    _, info = load_bundle(str(folder / "model"))
    resize, crop, batch_rows = info.preprocess.resize, info.preprocess.crop, 32
    width = round(resize * 500 / 375)  # Daft's resize takes both sides
    left, top = (width - crop) // 2, (resize - crop) // 2
    out = folder / f"daft-{os.getpid()}"
    model, moments = str(folder / "model"), f"{out}.txt"  # a Daft class is pickled: a list would be a copy

    @daft.cls(max_concurrency=1, use_process=False)
    class Encode:
        def __init__(self) -> None:
            from hashnet.encoding.encoder import Encoder

            self.encoder = Encoder.load(model, engine=engine, batch_rows=batch_rows)

        @daft.method.batch(return_dtype=daft.DataType.binary(), batch_size=batch_rows)
        def __call__(self, pictures: daft.Series) -> list[bytes]:
            squares = [pixels[top : top + crop, left : left + crop] for pixels in pictures.to_pylist()]
            pixels = np.stack(squares).transpose(0, 3, 1, 2)
            codes = self.encoder.encode(pixels) if whole else np.zeros((len(pixels), 1), np.uint8)
            with open(moments, "a") as file:
                print(time.perf_counter(), len(codes), file=file)
            return [code.tobytes() for code in codes]

    uris = [str(folder / f"{i % N_FILES:04d}.jpg") for i in range(n_images)]
    picture = functions.decode_image(functions.download(daft.col("uri")))
    code = Encode()(functions.resize(picture, width, resize))
    started, busy = time.perf_counter(), CpuClock()
    daft.from_pydict({"uri": uris}).select("uri", code.alias("code")).write_parquet(str(out))
    whole = time.perf_counter() - started
    begin, end, n = in_the_middle([(moment, int(rows)) for moment, rows in np.loadtxt(moments, ndmin=2)])
    return {
        "rate": n / (end - begin),
        "cpu_ms": (busy.at(end) - busy.at(begin)) / n * 1000,
        "rate_with_start": n_images / whole,
    }


def bare_loop(folder: Path) -> dict[str, float]:
    """One process: Parquet → numpy → torch → packed bits → Parquet, nothing checked or recorded."""
    import torch

    from hashnet.models.bundle import load_bundle

    model, _ = load_bundle(str(folder / "model"))
    out = folder / f"bare-{os.getpid()}"
    out.mkdir()
    n, number = 0, 0
    started = time.perf_counter()
    with torch.inference_mode():
        for path in sorted((folder / "manifest.parquet").glob("*.parquet")):
            for batch in pq.ParquetFile(path).iter_batches(
                8192, columns=["row_id", "uri", "labels", "feature"]
            ):
                rows = batch["feature"].flatten().to_numpy().reshape(-1, N_FEATURES)
                bits = np.packbits(model(torch.from_numpy(rows.copy())).numpy() >= 0, axis=1)
                code = pa.Array.from_buffers(pa.binary(N_BITS // 8), len(bits), [None, pa.py_buffer(bits)])
                table = pa.table(
                    {"row_id": batch["row_id"], "uri": batch["uri"], "labels": batch["labels"], "code": code}
                )
                pq.write_table(table, out / f"{number:05d}.parquet", compression="zstd")
                n, number = n + len(batch), number + 1
    return {"rate": n / (time.perf_counter() - started)}


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "pipeline": pipeline, "tight loop": tight_loop, "DataLoader": data_loader, "bare loop": bare_loop,
    "engines": engines, "one thread": one_thread, "Daft": daft, "decoding": decoding,
}  # fmt: skip


def alone(case: str, folder: Path, *arguments: Any) -> dict[str, Any]:
    """The case in a process of its own."""
    words = [sys.executable, __file__, "case", json.dumps([case, str(folder), *arguments])]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def say(**row: Any) -> None:
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def pictures(folder: Path, backbone: str, n_images: int, engine: str) -> None:
    make_pictures(folder, n_images, backbone, engine)
    few = n_images // 4
    alone("tight loop", folder, engine, 64)  # fills the compiler's cache: outside every timing
    before = alone("tight loop", folder, engine, few)
    daft_before = alone("Daft", folder, engine, few)
    ours = alone("pipeline", folder, engine)
    daft_after = alone("Daft", folder, engine, few)
    after = alone("tight loop", folder, engine, few)
    least = alone("one thread", folder, engine, 512)["cpu_ms"]
    loader = alone("DataLoader", folder, few)["rate"]
    print(
        json.dumps({"case": "engines", "backbone": backbone, **alone("engines", folder)}),
        flush=True,
    )
    about = {
        "backbone": backbone,
        "engine": engine,
        "images": n_images,
        "cores": n_cores(),
        "unit": "images/s",
    }
    tight = {name: (before[name] + after[name]) / 2 for name in before}
    say(case="tight loop", **tight, before=before["rate"], after=after["rate"], **about)
    say(case="DataLoader, eager, PIL", rate=loader, **about)
    against_daft = {}
    if "missing" in daft_before:
        print(f"Daft is left out: {daft_before['missing']}", file=sys.stderr, flush=True)
    else:
        of_daft = {name: (daft_before[name] + daft_after[name]) / 2 for name in daft_before}
        say(case="Daft", **of_daft, before=daft_before["rate"], after=daft_after["rate"], **about)
        against_daft = {"ratio_to_daft": ours["rate"] / of_daft["rate"]}
    say(
        case="pipeline", **ours, **about, **against_daft,
        ratio_to_tight_loop=ours["rate"] / tight["rate"],
        ratio_to_least_cpu_time=least / ours["cpu_ms"],
        ratio_to_data_loader=ours["rate"] / loader,
    )  # fmt: skip


def cores(folder: Path, backbone: str, n_images: int, engine: str) -> None:
    """One row for each of ours, a DataLoader and Daft: decoding and the whole way, on one core and on two."""
    make_pictures(folder, n_images, backbone, engine)
    few = n_images // 4
    cases = {
        "hashnet": (("decoding", few), ("pipeline", engine)),
        "a DataLoader loop": (("DataLoader", few, False), ("DataLoader", few)),
        "Daft": (("Daft", engine, few, False), ("Daft", engine, few)),
    }
    for who, (decode, whole) in cases.items():
        rates: dict[str, Any] = {}
        for n in (1, 2):
            with on_cores(n):
                for name, (case, *arguments) in (("decode", decode), ("whole", whole)):
                    found = alone(case, folder, *arguments)
                    rates |= {f"{name}_{n}": found["rate"]} if "rate" in found else {}
        if rates:
            about = {"backbone": backbone, "engine": engine, "images": n_images, "unit": "images/s"}
            say(case=f"one core and two, {who}", **rates, **about)
        else:
            print(f"{who} is left out: it is not installed", file=sys.stderr, flush=True)


def features(folder: Path, rows: int) -> None:
    make_features(folder, rows)
    before = alone("bare loop", folder)["rate"]
    ours = alone("pipeline", folder, "auto")
    after = alone("bare loop", folder)["rate"]
    bare = (before + after) / 2
    about = {"rows": rows, "n_features": N_FEATURES, "n_bits": N_BITS, "cores": n_cores(), "unit": "rows/s"}
    say(case="bare loop", rate=bare, before=before, after=after, **about)
    say(
        case="pipeline", rate=ours["rate"], rate_with_start=ours["rate_with_start"],
        ratio_to_bare_loop=ours["rate"] / bare, **about,
    )  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["case"]:
        name, folder, *arguments = json.loads(sys.argv[2])
        print(json.dumps(CASES[name](Path(folder), *arguments), default=float))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pictures", "features", "cores"))
    parser.add_argument("--backbone", default="alexnet")
    parser.add_argument("--engine", default="cpu-fused")
    parser.add_argument("--images", type=int, help="default 8000; with cores, 4000")
    parser.add_argument("--rows", type=int, default=1_300_000)
    parser.add_argument("--cores", type=int, help="use so many of the machine's cores (none: all)")
    options = parser.parse_args()
    if options.what == "cores" and options.cores:
        parser.error("cores measures one core and two: leave --cores out")
    images = options.images or (4000 if options.what == "cores" else 8000)
    with tempfile.TemporaryDirectory(prefix="hashnet-bench-") as name, on_cores(options.cores):
        if options.what == "pictures":
            pictures(Path(name), options.backbone, images, options.engine)
        elif options.what == "cores":
            cores(Path(name), options.backbone, images, options.engine)
        else:
            features(Path(name), options.rows)


if __name__ == "__main__":
    main()
