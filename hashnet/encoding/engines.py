"""Where and how a model runs: device, eager or compiled, dtype, and the one batch shape it runs in.

    cuda           autocast float16, channels_last, pinned copies; normalisation on the device
    cpu-compiled   float32, channels_last, torch.compile with frozen weights (needs a C++ compiler)
    cpu-eager      float32, channels_last

The rounding of a matrix product depends on its shape. Every batch therefore has exactly ``batch_rows`` rows,
the last one padded with zeros: in a fixed shape the logits of a row depend neither on its neighbours, nor on
its position, nor on the number of threads (tests check all three). Between engines a logit moves within
rounding, and a bit may flip where its logit is that close to zero.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hashnet.errors import ModelError
from hashnet.models import BatchedInference, HashModel, OutputModule, as_tensor

log = logging.getLogger(__name__)

ENGINES = ("cuda", "cpu-compiled", "cpu-eager")
DEVICES = ("auto", "cpu", "cuda")  # may be requested instead: the engine that suits the device
# Fixed rows of a batch by (engine is CUDA, modality). 32 pictures fill two to four cores; vectors are light.
BATCH_ROWS = {(False, "image"): 32, (True, "image"): 256, (False, "features"): 1024, (True, "features"): 8192}


@dataclass(frozen=True)
class EngineSpec:
    """An engine's entries in the lineage of codes: its name, dtype and the rows of its fixed batch."""

    engine: str
    dtype: str
    batch_rows: int

    @classmethod
    def of(cls, engine: str, modality: str, batch_rows: int | None = None) -> EngineSpec:
        """The entries of the engine of that name; ``batch_rows`` None is the default of the modality."""
        cuda = engine == "cuda"
        dtype = "float16 autocast" if cuda else "float32"
        return cls(engine, dtype, batch_rows or BATCH_ROWS[cuda, modality])


class Engine:
    """Runs a model in one fixed shape; ``spec`` belongs to the lineage, ``why`` is the reason for the choice.

    ``engine`` is one of ENGINES, or a device (auto, cpu, cuda) that the engine is chosen for, with
    ``compile`` (None: where it helps). A model that cannot be compiled runs eagerly unless compiling was
    requested.
    """

    def __init__(
        self,
        model: HashModel,
        engine: str = "auto",
        batch_rows: int | None = None,
        compile: bool | None = None,
    ) -> None:
        name, self.why = choose_engine(engine, model.modality, compile)
        self.spec = EngineSpec.of(name, model.modality, batch_rows)
        self._model = model.eval().to("cuda" if name == "cuda" else "cpu")
        if model.modality == "image":
            self._model = self._model.to(memory_format=torch.channels_last)
        self._loops: dict[str, BatchedInference] = {}
        if name == "cpu-compiled":
            try:
                self._compile()
            except Exception as error:  # whatever a tool chain can do wrong: a header, a linker, a flag
                if engine == name or compile:
                    raise ModelError(f"the model cannot be compiled here: {error}") from error
                self.why = f"compiling failed: {type(error).__name__}"
                self.spec = EngineSpec.of("cpu-eager", model.modality, batch_rows)
                self._loops.clear()
        spec = self.spec
        log.info("engine: %s, %s, batches of %d (%s)", spec.engine, spec.dtype, spec.batch_rows, self.why)

    @property
    def name(self) -> str:
        return self.spec.engine

    def run(self, rows: np.ndarray, output: str = "logits") -> np.ndarray:
        """float32 (n, width): ``logits`` or ``features`` of prepared rows, any n."""
        read = lambda start, stop: as_tensor(rows[start:stop])  # noqa: E731 - one line says it best
        return self._loop(output)(read, len(rows)).numpy()

    def _loop(self, output: str) -> BatchedInference:
        if output not in self._loops:
            module: Any = OutputModule(self._model, output).eval()
            if self.name == "cpu-compiled":
                # It warns that there is no CUDA, which is why this engine was chosen.
                logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
                module = torch.compile(module, dynamic=False, options={"freezing": True})
            self._loops[output] = BatchedInference(
                self._model,
                output,
                batch_rows=self.spec.batch_rows,
                device="cuda" if self.name == "cuda" else "cpu",
                pad=True,
                half=self.name == "cuda",
                channels_last=self._model.modality == "image",
                module=module,
            )
        return self._loops[output]

    def _compile(self) -> None:
        """Runs one row of zeros: compiling happens at the first call."""
        preprocess, width = self._model.spec.preprocess, self._model.spec.n_inputs
        if preprocess is not None:
            self.run(np.zeros((1, 3, preprocess.crop, preprocess.crop), dtype=np.uint8))
        else:
            self.run(np.zeros((1, width or 0), dtype=np.float32))


def choose_engine(engine: str, modality: str, compile: bool | None = None) -> tuple[str, str]:
    """(name, reason): the engine that a request comes to on this machine.

    ``engine`` is an engine's name, or a device (auto, cpu, cuda) with ``compile`` (None: choose).
    """
    if engine not in (*DEVICES, *ENGINES):
        names = ", ".join((*DEVICES, *ENGINES))
        raise ModelError(f"unknown engine {engine!r}; there are {names}")
    if engine == "cuda" and compile:
        raise ModelError("compile=true is for the CPU; leave it out with device=cuda")
    if engine == "cuda" and not torch.cuda.is_available():
        raise ModelError("cuda was requested, but torch sees no CUDA device here; use device=cpu")
    if engine in ("auto", "cuda") and torch.cuda.is_available():
        return "cuda", "as requested" if engine == "cuda" else torch.cuda.get_device_name()
    compiler = _compiler()
    if engine == "cpu-compiled" or (compile and engine != "cpu-eager"):
        if compiler is None:
            raise ModelError("a compiled model was requested, but there is no C++ compiler; install g++")
        return "cpu-compiled", "as requested"
    if engine == "cpu-eager" or compile is False:
        return "cpu-eager", "as requested"
    if modality == "features":
        return "cpu-eager", "one or two matrix products: nothing to compile"
    if compiler is None:
        return "cpu-eager", "no C++ compiler found; with one, pictures may encode twice as fast"
    return "cpu-compiled", f"with {os.path.basename(compiler)}"


def _compiler() -> str | None:
    """Path of the C++ compiler that torch.compile would use."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None
