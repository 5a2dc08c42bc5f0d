"""Encoding against loops by hand: pictures and features a second, as ratios of the same run.

    python tests/bench/encoding.py pictures [--backbone alexnet] [--images 8000]
    python tests/bench/encoding.py features [--rows 1300000]
    python tests/bench/encoding.py memory   [--rows 1300000] [--images 100000]

Prints one JSON row a case; every case runs in a process of its own, and the peers run before and after
the pipeline. ``pictures`` takes JPEGs of 500 x 375. Peers: ``tight loop``, one process with decoding
threads and a forward that never waits for them, same model, same engine; ``DataLoader``, what a user
would write (PIL, torchvision transforms, eager, two worker processes). Compiling and loading are outside
every timing: the pipeline's rate is taken between 25 % and 80 % of its rows, when all its queues are as
full as they get, and its whole time is given beside it. ``features`` compares with one process that
reads the same Parquet and writes the same codes. ``memory`` gives the peak of the summed proportional
set size of all processes, the object store capped at 1 GB.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

N_FILES = 400  # different JPEGs; the manifest names them again and again
N_FEATURES, N_BITS = 64, 64


def make_pictures(folder: Path, n_images: int, backbone: str, engine: str) -> None:
    """JPEGs with the detail of photographs (about 60 kB each), a manifest of them, and a random model."""
    import torch
    from PIL import Image

    from hashnet.data.rows import from_uris
    from hashnet.data.writer import write_manifest
    from hashnet.models import build_model
    from hashnet.training.bundle import save_bundle

    rng = np.random.default_rng(0)
    for i in range(N_FILES):
        coarse = Image.fromarray(rng.integers(0, 256, size=(24, 32, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)) + rng.normal(
            0, 12, (375, 500, 3)
        )
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i:04d}.jpg", quality=85)
    uris = pa.array([str(folder / f"{i % N_FILES:04d}.jpg") for i in range(n_images)])
    write_manifest(str(folder / "manifest.parquet"), from_uris(uris), np.full(n_images, 4, np.uint8))
    torch.manual_seed(0)
    save_bundle(str(folder / "model"), build_model(backbone, 48))


def make_features(folder: Path, rows: int) -> None:
    """Random feature rows in a manifest, and a random model for them."""
    import torch

    from hashnet.data.rows import Rows
    from hashnet.data.writer import write_manifest
    from hashnet.models import build_model
    from hashnet.training.bundle import save_bundle

    def payload(start: int, stop: int) -> pa.Table:
        values = np.random.default_rng(start).normal(size=(stop - start, N_FEATURES)).astype(np.float32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), N_FEATURES)
        return pa.table({"uri": pa.nulls(stop - start, pa.string()), "feature": column})

    table = Rows(rows, payload, modality="features", n_features=N_FEATURES)
    write_manifest(str(folder / "manifest.parquet"), table, np.full(rows, 4, np.uint8))
    torch.manual_seed(0)
    save_bundle(str(folder / "model"), build_model("features", N_BITS, n_features=N_FEATURES))


def pipeline(folder: Path, engine: str) -> dict[str, float]:
    """The job itself; rate between 25 % and 80 % of the rows, and rows over the whole time."""
    import cluster.encode_stages as stages
    from cluster import session
    from cluster.encoding import EncodeConfig, encode_database

    seen: list[tuple[float, int]] = []

    def watched(
        run: Callable[..., Iterator[Any]], rows_of: Callable[[Any], int]
    ) -> Callable[..., Iterator[Any]]:
        def inner(*arguments: Any) -> Iterator[Any]:
            for item in run(*arguments):
                seen.append((time.perf_counter(), rows_of(item)))
                yield item

        return inner

    stages.run_pictures = watched(stages.run_pictures, len)  # type: ignore[assignment]
    stages.run_features = watched(stages.run_features, lambda item: item[1])  # type: ignore[assignment]
    session.connect(object_store_memory=500_000_000)
    started = time.perf_counter()
    encode_database(EncodeConfig(run=str(folder), engine=engine, out=str(folder / f"codes-{os.getpid()}")))
    whole = time.perf_counter() - started
    done = np.cumsum([n for _, n in seen])
    first, last = np.searchsorted(done, 0.25 * done[-1]), np.searchsorted(done, 0.8 * done[-1])
    rate = (done[last] - done[first]) / (seen[last][0] - seen[first][0])
    return {"rate": rate, "rate_with_start": done[-1] / whole}


def tight_loop(folder: Path, engine: str, n_images: int) -> dict[str, float]:
    """One process: two threads decode ahead while the model runs on what is decoded."""
    from hashnet.encoding import Encoder

    encoder = Encoder.load(str(folder / "model"), engine=engine)
    paths = [folder / f"{i % N_FILES:04d}.jpg" for i in range(n_images)]
    rows = encoder.batch_rows

    def decode(start: int) -> np.ndarray:
        return np.stack([encoder.preprocess.eval(path.read_bytes()) for path in paths[start : start + rows]])

    encoder.encode(decode(0))
    starts = iter(range(0, n_images, rows))
    started = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ahead = deque(pool.submit(decode, start) for start, _ in zip(starts, range(6), strict=False))
        while ahead:
            pixels = ahead.popleft().result()
            if (start := next(starts, None)) is not None:
                ahead.append(pool.submit(decode, start))
            encoder.encode(pixels)
    return {"rate": n_images / (time.perf_counter() - started)}


def engines(folder: Path) -> dict[str, float]:
    """Bits that differ between eager and compiled, and the largest logit among them."""
    from hashnet.encoding import Encoder

    paths = [folder / f"{i:04d}.jpg" for i in range(N_FILES)]
    a, b = (
        Encoder.load(str(folder / "model"), engine=f"cpu-{e}").logits(paths) for e in ("eager", "compiled")
    )
    flipped = (a >= 0) != (b >= 0)
    return {
        "bits": flipped.size,
        "bits_that_differ": int(flipped.sum()),
        "largest_logit_among_them": float(np.abs(a[flipped]).max(initial=0)),
        "largest_difference_of_a_logit": float(np.abs(a - b).max()),
    }


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


def data_loader(folder: Path, n_images: int) -> dict[str, float]:
    """A DataLoader with a worker process a core, eager, contiguous tensors."""
    import torch

    from hashnet.codes import pack_signs
    from hashnet.training.bundle import load_bundle

    model, info = load_bundle(str(folder / "model"))
    data = _Pictures(folder, n_images, info.preprocess.resize, info.preprocess.crop)
    loader = torch.utils.data.DataLoader(data, batch_size=32, num_workers=os.cpu_count() or 1)
    batches = iter(loader)
    with torch.inference_mode():
        pack_signs(model(next(batches)))  # workers are up from here on
        started = time.perf_counter()
        n = sum(len(pack_signs(model(batch))) for batch in batches)
    return {"rate": n / (time.perf_counter() - started)}


def bare_loop(folder: Path) -> dict[str, float]:
    """One process: Parquet → numpy → torch → packed bits → Parquet, nothing checked or recorded."""
    import torch

    from hashnet.training.bundle import load_bundle

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


def peak_memory(folder: Path, engine: str) -> dict[str, float]:
    """Peak of the summed PSS of this process and everything below it while the job runs."""
    import psutil

    from cluster import session
    from cluster.encoding import EncodeConfig, encode_database

    peak, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.3):
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                    total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
                except (OSError, StopIteration):  # it ended meanwhile
                    continue
            peak = max(peak, total)

    session.connect(object_store_memory=1_000_000_000)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    result = encode_database(EncodeConfig(run=str(folder), engine=engine, out=str(folder / "codes")))
    seconds = time.perf_counter() - started
    stop.set()
    watcher.join()
    return {"rows": result["rows"], "seconds": round(seconds, 1), "peak_pss_mb": round(peak / 1e6)}


CASES: dict[str, Callable[..., dict[str, float]]] = {
    "pipeline": pipeline, "tight loop": tight_loop, "DataLoader": data_loader, "bare loop": bare_loop,
    "memory": peak_memory, "engines": engines,
}  # fmt: skip


def alone(case: str, folder: Path, *arguments: Any) -> dict[str, float]:
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
    before = alone("tight loop", folder, engine, few)["rate"]
    ours = alone("pipeline", folder, engine)
    after = alone("tight loop", folder, engine, few)["rate"]
    loader = alone("DataLoader", folder, few)["rate"]
    print(
        json.dumps({"case": "eager against compiled", "backbone": backbone, **alone("engines", folder)}),
        flush=True,
    )
    about = {"backbone": backbone, "engine": engine, "images": n_images, "unit": "images/s"}
    tight = (before + after) / 2
    say(case="tight loop", rate=tight, before=before, after=after, **about)
    say(case="DataLoader, eager, PIL", rate=loader, **about)
    say(
        case="pipeline", rate=ours["rate"], rate_with_start=ours["rate_with_start"],
        ratio_to_tight_loop=ours["rate"] / tight, ratio_to_data_loader=ours["rate"] / loader, **about,
    )  # fmt: skip


def features(folder: Path, rows: int) -> None:
    make_features(folder, rows)
    before = alone("bare loop", folder)["rate"]
    ours = alone("pipeline", folder, "auto")
    after = alone("bare loop", folder)["rate"]
    bare = (before + after) / 2
    about = {"rows": rows, "n_features": N_FEATURES, "n_bits": N_BITS, "unit": "rows/s"}
    say(case="bare loop", rate=bare, before=before, after=after, **about)
    say(
        case="pipeline", rate=ours["rate"], rate_with_start=ours["rate_with_start"],
        ratio_to_bare_loop=ours["rate"] / bare, **about,
    )  # fmt: skip


def memory(folder: Path, rows: int, n_images: int) -> None:
    """A tenth of the rows, then all of them; and many small pictures."""
    import torch

    from hashnet.data.sources import make_manifest
    from hashnet.models import build_model
    from hashnet.training.bundle import save_bundle

    peaks = []
    for n in (rows // 10, rows):
        where = folder / f"features-{n}"
        make_features(where, n)
        row = alone("memory", where, "auto")
        peaks.append(row["peak_pss_mb"])
        say(case="features", n_features=N_FEATURES, **row)
    say(case="features", ratio_of_peaks=peaks[1] / peaks[0])
    for n in (n_images // 10, n_images):
        where = folder / f"pictures-{n}"
        make_manifest(
            "synthetic", str(where / "manifest.parquet"), n_images=n, side=32, n_query=10, n_train=10
        )
        torch.manual_seed(0)
        save_bundle(str(where / "model"), build_model("small_cnn", 48))
        say(case="pictures of 32 x 32", backbone="small_cnn", **alone("memory", where, "cpu-eager"))


def main() -> None:
    if sys.argv[1:2] == ["case"]:
        name, folder, *arguments = json.loads(sys.argv[2])
        print(json.dumps(CASES[name](Path(folder), *arguments), default=float))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pictures", "features", "memory"))
    parser.add_argument("--backbone", default="alexnet")
    parser.add_argument("--engine", default="cpu-compiled")
    parser.add_argument("--images", type=int)
    parser.add_argument("--rows", type=int, default=1_300_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hashnet-bench-") as name:
        if options.what == "pictures":
            pictures(Path(name), options.backbone, options.images or 8000, options.engine)
        elif options.what == "features":
            features(Path(name), options.rows)
        else:
            memory(Path(name), options.rows, options.images or 100_000)


if __name__ == "__main__":
    main()
