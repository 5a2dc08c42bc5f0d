"""Where and how a model runs: device, eager or compiled, dtype, and the one batch shape it runs in.

    cuda           autocast float16, channels_last, pinned copies; normalisation on the device
    cpu-compiled   float32, channels_last, torch.compile with frozen weights (needs a C++ compiler)
    cpu-eager      float32, channels_last

The rounding of a matrix product depends on its shape: every batch therefore has exactly
``batch_rows`` rows, the last one padded with zeros. In a fixed shape the logits of a row depend
neither on its neighbours, nor on its place, nor on the number of threads (tests check all three).
Between engines a logit moves within rounding, and a bit may flip where it is that close to zero.
"""

from __future__ import annotations

import logging
import os
import shutil
from typing import Any

import numpy as np
import torch
from torch import nn

from hashnet.errors import ModelError
from hashnet.models import HashModel

log = logging.getLogger(__name__)

ENGINES = ("auto", "cuda", "cpu-compiled", "cpu-eager")
# Fixed rows of a batch by (engine is CUDA, modality). 32 pictures fill two to four cores; vectors are light.
BATCH_ROWS = {(False, "image"): 32, (True, "image"): 256, (False, "features"): 1024, (True, "features"): 8192}


class _Logits(nn.Module):
    def __init__(self, model: HashModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class _Features(_Logits):
    """The backbone's output; for ``features`` models, which have no backbone, what the hash layer sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picture = self.model.modality == "image"
        return self.model.raw_features(x) if picture else self.model.features(x)


class Engine:
    """Runs a model in one fixed shape. ``name``, ``dtype`` and ``batch_rows`` belong to the lineage.

    ``why`` says in a few words how it came to be this one.
    """

    def __init__(self, model: HashModel, engine: str = "auto", batch_rows: int | None = None) -> None:
        if engine not in ENGINES:
            raise ModelError(f"unknown engine {engine!r}; there are {', '.join(ENGINES)}")
        self.name, self.why = choose(engine, model.modality)
        about = facts(self.name, model.modality)
        self.dtype: str = about["dtype"]
        self.batch_rows: int = batch_rows or about["batch_rows"]
        self.device = torch.device("cuda" if self.name == "cuda" else "cpu")
        self._image = model.modality == "image"
        self._model = model.eval().to(self.device)
        if self._image:
            self._model = self._model.to(memory_format=torch.channels_last)
        self._functions: dict[str, Any] = {}
        if self.name == "cpu-compiled":
            try:
                self._warm("logits")
            except Exception as error:  # whatever a tool chain can do wrong: a header, a linker, a flag
                if engine != "auto":
                    raise ModelError(f"the model cannot be compiled here: {error}") from error
                self.name, self.why = "cpu-eager", f"compiling failed: {type(error).__name__}"
                self._functions.clear()
        log.info("engine: %s, %s, batches of %d (%s)", self.name, self.dtype, self.batch_rows, self.why)

    def run(self, rows: np.ndarray, what: str = "logits") -> np.ndarray:
        """float32 (n, width): ``logits`` or ``features`` of prepared rows, any n."""
        n, size = len(rows), self.batch_rows
        outputs = []
        function = self._function(what)
        with torch.inference_mode():
            for start in range(0, n, size):
                batch = self._to_device(rows[start : start + size])
                with torch.autocast("cuda", torch.float16, enabled=self.name == "cuda"):
                    outputs.append(function(batch)[: n - start].float())
            if not outputs:
                return np.zeros((0, self.width(what)), dtype=np.float32)
            return torch.cat(outputs).cpu().numpy()

    def width(self, what: str = "logits") -> int:
        """Columns of what ``run`` gives."""
        return self._model.n_bits if what == "logits" else self._model.spec.n_features

    def _to_device(self, rows: np.ndarray) -> torch.Tensor:
        if len(rows) < self.batch_rows:  # the last batch: padded to the one shape
            padded = np.zeros((self.batch_rows, *rows.shape[1:]), dtype=rows.dtype)
            padded[: len(rows)] = rows
            rows = padded
        elif not rows.flags.writeable:  # a view of shared memory, which torch does not take
            rows = rows.copy()
        batch = torch.from_numpy(rows)
        if self.name == "cuda":
            batch = batch.pin_memory().to(self.device, non_blocking=True)
        return batch.contiguous(memory_format=torch.channels_last) if self._image else batch

    def _function(self, what: str) -> Any:
        if what not in self._functions:
            module: Any = {"logits": _Logits, "features": _Features}[what](self._model).eval()
            if self.name == "cpu-compiled":
                # It warns that there is no CUDA, which is why this engine was chosen.
                logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
                module = torch.compile(module, dynamic=False, options={"freezing": True})
            self._functions[what] = module
        return self._functions[what]

    def _warm(self, what: str) -> None:
        preprocess, width = self._model.spec.preprocess, self._model.spec.n_inputs
        if preprocess is not None:
            rows = np.zeros((1, 3, preprocess.crop, preprocess.crop), dtype=np.uint8)
        else:
            rows = np.zeros((1, width or 0), dtype=np.float32)
        self.run(rows, what)


def choose(engine: str, modality: str) -> tuple[str, str]:
    """The engine's name on this machine and the reason, for the one line that says so."""
    if engine != "auto":
        if engine == "cuda" and not torch.cuda.is_available():
            raise ModelError("engine cuda was asked for, but torch sees no CUDA device here")
        if engine == "cpu-compiled" and not _compiler():
            raise ModelError("engine cpu-compiled was asked for, but there is no C++ compiler; install g++")
        return engine, "as asked"
    if torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name()
    if modality == "features":
        return "cpu-eager", "one or two matrix products: nothing to compile"
    compiler = _compiler()
    if compiler is None:
        return "cpu-eager", "no C++ compiler found; with one, pictures may encode twice as fast"
    return "cpu-compiled", f"with {os.path.basename(compiler)}"


def facts(engine: str, modality: str) -> dict[str, Any]:
    """An engine's entries in the lineage: its name, dtype and fixed batch."""
    cuda = engine == "cuda"
    return {
        "engine": engine,
        "dtype": "float16 autocast" if cuda else "float32",
        "batch_rows": BATCH_ROWS[cuda, modality],
    }


def _compiler() -> str | None:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None
