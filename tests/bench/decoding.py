"""Bytes of a JPEG → the pixels a network takes, by several routes: processor time, and equal pixels.

    python tests/bench/decoding.py [--pictures DIR] [--repeat 7] [--threads 2]

One JSON row per route; ``ratio`` is against Pillow alone (decode, resize the crop's box, planes), best of
``--repeat`` rounds in turns. Without --pictures, JPEGs of 500 x 375 with the detail of photographs are made.
``hashnet`` is the product's own route; ``equal`` says whether a route gives Pillow's pixels on every picture,
``within`` by how much a value differs at most. The routes take one thread each; the last rows have pictures
per second of hashnet's, by the clock, for each number of threads up to --threads.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

N_PICTURES = 64


def routes(resize: int, crop: int) -> dict[str, Callable[[bytes], np.ndarray]]:
    import simplejpeg
    import torch
    from PIL import Image
    from torchvision.io import decode_jpeg
    from torchvision.transforms.v2 import functional

    from hashnet.data import Preprocess
    from hashnet.kernels import resample

    torch.set_num_threads(1)
    preprocess = Preprocess(resize=resize, crop=crop)

    def box(width: int, height: int) -> tuple[float, float, float, float]:
        scale = resize / min(width, height)
        w, h = max(resize, round(width * scale)), max(resize, round(height * scale))
        x, y, left, top = width / w, height / h, (w - crop) // 2, (h - crop) // 2
        return left * x, top * y, min((left + crop) * x, width), min((top + crop) * y, height)

    def pillow(data: bytes) -> np.ndarray:
        picture = Image.open(io.BytesIO(data), formats=("JPEG",))
        picture.draft(None, (resize, resize))
        square = picture.resize((crop, crop), Image.Resampling.BILINEAR, box=box(*picture.size))
        return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))

    def on_tensor(pixels: torch.Tensor) -> np.ndarray:
        small = functional.resize(pixels, [resize], antialias=True)
        return functional.center_crop(small, [crop, crop]).numpy()

    def torchvision(data: bytes) -> np.ndarray:
        return on_tensor(decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8)))

    def simplejpeg_torch(data: bytes) -> np.ndarray:
        return on_tensor(torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB")).permute(2, 0, 1))

    def scaled(data: bytes) -> np.ndarray:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=resize, min_width=resize)
        return resample(pixels, box(pixels.shape[1], pixels.shape[0]), crop)

    def rough(data: bytes) -> np.ndarray:
        pixels = simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
        return resample(pixels, box(pixels.shape[1], pixels.shape[0]), crop)

    return {
        "Pillow": pillow,
        "hashnet": preprocess.eval,
        "torchvision, torch's resize": torchvision,
        "simplejpeg, torch's resize": simplejpeg_torch,
        "simplejpeg scaled by n/8, our resize": scaled,
        "simplejpeg fast DCT and upsampling, our resize": rough,
        "simplejpeg, decoding alone": lambda data: simplejpeg.decode_jpeg(data, "RGB"),
    }


def make_pictures() -> list[bytes]:
    from encoding import make_pictures as make

    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), N_PICTURES, "small_cnn", "cpu-eager")
        return [path.read_bytes() for path in sorted(Path(folder).glob("*.jpg"))[:N_PICTURES]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, help="folder of JPEGs")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    if arguments.pictures:
        data = [path.read_bytes() for path in sorted(arguments.pictures.glob("*.jp*g"))[:N_PICTURES]]
    else:
        data = make_pictures()
    found = routes(256, 224)
    wanted = [found["Pillow"](one) for one in data]
    cpu_ms = dict.fromkeys(found, np.inf)
    for _ in range(arguments.repeat):
        for name, route in found.items():
            busy = time.process_time()
            for one in data:
                route(one)
            cpu_ms[name] = min(cpu_ms[name], (time.process_time() - busy) / len(data) * 1000)
    for name, route in found.items():
        row = {"case": name, "pictures": len(data), "cpu_ms": round(cpu_ms[name], 3)}
        row |= {"per_core": round(1000 / cpu_ms[name]), "ratio": round(cpu_ms["Pillow"] / cpu_ms[name], 2)}
        if "alone" not in name:
            gaps = [np.abs(route(one).astype(int) - pixels) for one, pixels in zip(data, wanted, strict=True)]
            row |= {"equal": not any(gap.any() for gap in gaps), "within": int(max(g.max() for g in gaps))}
        print(json.dumps(row), flush=True)
    for threads in range(1, arguments.threads + 1):
        rate = max(per_second(data, threads) for _ in range(arguments.repeat))
        print(
            json.dumps({"case": "hashnet, by threads", "threads": threads, "rate": round(rate)}), flush=True
        )


def per_second(data: list[bytes], threads: int) -> float:
    """Pictures per second of hashnet's own route."""
    from hashnet.data import Preprocess

    started = time.perf_counter()
    Preprocess(resize=256, crop=224).eval_many(data, threads)
    return len(data) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
