"""JPEGs decoded, resized and cropped on the GPU: what the engine ``cuda-nvjpeg`` does before the model.

Its pixels are not those of ``hashnet.data.images``, by which models are trained: nvJPEG has its own inverse
transform and enlarges colour its own way, so codes differ wherever a logit is near zero. It is therefore an
engine of its own in the lineage, and runs on request alone. Which way a picture goes follows from the
picture itself, never from its neighbours.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hashnet.data import Preprocess, is_plain_jpeg
from hashnet.errors import BadImage, ModelError
from hashnet.models import out_of_memory

TOGETHER = 32  # pictures per call: at most 400 MB when decoded, as is_plain_jpeg has it
ALLOCATOR_FAILED = re.compile(r": 5$", re.MULTILINE)  # nvJPEG's status


class JpegDecoder:
    """Pixels as ``Preprocess.eval_many`` returns them, those of plain JPEGs made on ``device``."""

    def __init__(self, preprocess: Preprocess, device: str = "cuda") -> None:
        from torchvision.io import decode_jpeg

        warnings.filterwarnings("ignore", message=r"\s*The image decoding and encoding", module="torchvision")
        self.preprocess, self.device = preprocess, torch.device(device)
        self._decode: Any = decode_jpeg
        self._of_thread = threading.local()

    def eval_many(
        self, pictures: Sequence[bytes | BadImage], threads: int = 1
    ) -> tuple[np.ndarray, dict[int, BadImage]]:
        """uint8 (n, 3, crop, crop), and the pictures that cannot be used by position (their pixels are 0)."""
        crop = self.preprocess.crop
        pixels = np.zeros((len(pictures), 3, crop, crop), dtype=np.uint8)
        plain = [i for i, data in enumerate(pictures) if is_plain_jpeg(data, self.preprocess)]
        made: set[int] = set()
        for start in range(0, len(plain), TOGETHER):
            group = plain[start : start + TOGETHER]
            jpegs = [torch.frombuffer(bytearray(pictures[i]), dtype=torch.uint8) for i in group]  # type: ignore[arg-type]
            for i, square in zip(group, self._squares(jpegs), strict=True):
                if square is not None:
                    pixels[i] = square
                    made.add(i)
        rest = [i for i in range(len(pictures)) if i not in made]
        pixels[rest], bad = self.preprocess.eval_many([pictures[i] for i in rest], threads)
        return pixels, {rest[at]: error for at, error in bad.items()}

    def _squares(self, jpegs: list[torch.Tensor]) -> list[np.ndarray | None]:
        """uint8 (3, crop, crop) of each JPEG; None for one that the decoder refuses.

        The decoder has a stream of its own, and writes into memory that the caller's stream may still be
        using, or gives it back while it still writes. So this has a stream, and thus memory, that nobody else
        uses, and both are idle before and after each call.
        """
        try:
            with self._stream():
                decoded = self._decode(jpegs, mode="RGB", device=self.device)
                return list(torch.stack([self._cut(picture) for picture in decoded]).cpu().numpy())
        except RuntimeError as error:  # one is enough, and it does not say which
            if out_of_memory(error) or ALLOCATOR_FAILED.search(str(error)):
                raise torch.OutOfMemoryError(str(error)) from error
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if len(jpegs) == 1:
                return [None]
            half = len(jpegs) // 2
            return self._squares(jpegs[:half]) + self._squares(jpegs[half:])

    def _stream(self) -> AbstractContextManager[Any]:
        if self.device.type != "cuda":
            return nullcontext()
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._of_thread.stream)

    def _cut(self, picture: torch.Tensor) -> torch.Tensor:
        """The centre of a resized picture (3, h, w), as ``Preprocess.eval`` has it."""
        crop = self.preprocess.crop
        height, width = self.preprocess.resized(*picture.shape[1:])
        whole = functional.interpolate(
            picture[None].float(), (height, width), mode="bilinear", antialias=True
        )
        top, left = (height - crop) // 2, (width - crop) // 2
        return whole[0, :, top : top + crop, left : left + crop].round().clamp(0, 255).to(torch.uint8)


def check_nvjpeg() -> None:
    """ModelError where this torchvision cannot decode on a GPU: a build without nvJPEG, a later version."""
    try:
        from torchvision.io import encode_jpeg

        pixel = encode_jpeg(torch.zeros(3, 8, 8, dtype=torch.uint8)).numpy().tobytes()
        decoder = JpegDecoder(Preprocess(resize=8, crop=8))
        if decoder._squares([torch.frombuffer(bytearray(pixel), dtype=torch.uint8)])[0] is None:
            raise RuntimeError("it refuses a plain JPEG")
    except (ImportError, RuntimeError) as error:
        raise ModelError(
            f"torchvision cannot decode JPEGs on the GPU here ({error}); leave decode=nvjpeg out"
        ) from error
