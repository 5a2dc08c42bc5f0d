"""Where and how a model runs: device, fused, compiled or eager, dtype, and the one batch shape it runs in.

    cuda           autocast float16, channels_last, pinned copies; normalisation on the device
    cuda-nvjpeg    the same, and plain JPEGs are decoded there too (``encoding.nvjpeg``): on request
    cpu-fused      float32, channels_last, convolutions fused with what follows them (``fuse``)
    cpu-compiled   float32, channels_last, torch.compile with frozen weights: on request
    cpu-eager      float32, channels_last: for feature rows, and on request

The rounding of a matrix product depends on its shape. Every batch therefore has exactly ``batch_rows`` rows,
the last one padded with zeros (on CUDA, rows after the last full batch run in batches of TAIL_ROWS, so that
one picture costs little; their logits may differ within rounding). In a fixed shape the logits of a row
depend neither on its neighbours, nor on its position, nor on the number of threads (tests check all three).
Between engines a logit moves within rounding, and a bit may flip where its logit is that close to zero. A
picture's logits are always computed in two steps, backbone then head: features that were kept give the same
bits as the picture itself.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional

from hashnet.encoding.nvjpeg import JpegDecoder, check_nvjpeg
from hashnet.errors import BadImage, ModelError
from hashnet.models import BatchedInference, HashModel, OutputModule, Submit, as_tensor, device_memory

log = logging.getLogger(__name__)

ENGINES = ("cuda", "cuda-nvjpeg", "cpu-fused", "cpu-compiled", "cpu-eager")
DEVICES = ("auto", "cpu", "cuda")  # may be requested instead: the engine that suits the device
# Fixed rows of a batch by (engine is CUDA, modality). 32 pictures fill two to four cores; vectors are light.
BATCH_ROWS = {(False, "image"): 32, (True, "image"): 256, (False, "features"): 1024, (True, "features"): 8192}


TAIL_ROWS = {"image": 16, "features": 512}  # of the batches after the last full one on CUDA


@dataclass(frozen=True)
class EngineSpec:
    """An engine's entries in the lineage of codes: its name, dtype and the rows of its fixed batch."""

    engine: str
    dtype: str
    batch_rows: int

    @classmethod
    def of(cls, engine: str, modality: str, batch_rows: int | None = None) -> EngineSpec:
        """The entries of the engine of that name; ``batch_rows`` None is the default of the modality."""
        cuda = engine.startswith("cuda")
        dtype = "float16 autocast" if cuda else "float32"
        return cls(engine, dtype, batch_rows or BATCH_ROWS[cuda, modality])


class _Backbone(nn.Module):
    """Pixels → the backbone's features, through ``network`` instead of the model's own backbone."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, model: HashModel, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", model.pixel_mean)
        self.register_buffer("std", model.pixel_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network((x.to(self.mean.dtype) - self.mean) / self.std)


class _Head(nn.Module):
    """What ``features`` returns → logits. A model of vectors has scaled them already (``OutputModule``)."""

    def __init__(self, model: HashModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.model.modality == "features":
            return self.model.head(features)
        return self.model.head((features - self.model.feature_mean) / self.model.feature_std)


class _Whole(nn.Module):
    """Pixels → logits: the backbone, then the head, as if its features had been returned in between.

    In one go: on a GPU a head by itself would wait behind the next batch, which another thread has started.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x).float().contiguous())


class Engine:
    """Runs a model in one fixed shape; ``spec`` belongs to the lineage.

    ``engine`` is one of ENGINES, or a device (auto, cpu, cuda) that the engine is chosen for, with
    ``compile`` (None: choose). The model stays in eval mode, and its weights must not change any more.
    """

    def __init__(
        self,
        model: HashModel,
        engine: str = "auto",
        batch_rows: int | None = None,
        compile: bool | None = None,
    ) -> None:
        name, why = choose_engine(engine, model.modality, compile)
        self.spec = EngineSpec.of(name, model.modality, batch_rows)
        self._device = "cuda" if name.startswith("cuda") else "cpu"
        with device_memory("the model", "use device=cpu, or a GPU that nobody else uses"):
            self._model = model.eval().to(self._device)
        preprocess = model.spec.preprocess
        self._decoder = JpegDecoder(preprocess) if name == "cuda-nvjpeg" and preprocess else preprocess
        if model.modality == "image" and name != "cpu-fused":  # a fused network has weights of its own
            self._model = self._model.to(memory_format=torch.channels_last)
        self._loops: dict[str, BatchedInference] = {}
        if name == "cpu-compiled":
            self._compile()
        spec = self.spec
        log.debug("engine: %s, %s, batches of %d (%s)", spec.engine, spec.dtype, spec.batch_rows, why)

    @property
    def name(self) -> str:
        return self.spec.engine

    def decode(
        self, pictures: Sequence[bytes | BadImage], threads: int = 1
    ) -> tuple[np.ndarray, dict[int, BadImage]]:
        """Pixels of pictures, and the bad ones among them, as ``Preprocess.eval_many`` returns them."""
        assert self._decoder is not None
        with device_memory(f"{len(pictures)} pictures", "leave decode=nvjpeg out"):
            return self._decoder.eval_many(pictures, threads)

    def run(self, rows: np.ndarray, output: str = "logits") -> np.ndarray:
        """float32 (n, width): ``logits`` or ``features`` of prepared rows, any n.

        With ``average_flip`` features are the mean of a picture's and its mirror image's.
        """
        preprocess = self._model.spec.preprocess
        averages = preprocess is not None and preprocess.average_flip
        if averages and output == "logits":
            return self.head(self.run(rows, "features"))
        values = self._run(output, rows)
        if averages:
            values = (values + self._run(output, np.ascontiguousarray(rows[..., ::-1]))) / 2
        return values

    def stream(
        self, read: Callable[[int, int], np.ndarray], n_rows: int, submit: Submit
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """(start, stop, backbone's features) of pictures in order; ``submit`` reads ahead."""
        loop = self._loop("features")
        for start, stop, found in loop.stream(lambda a, b: as_tensor(read(a, b)), n_rows, submit):
            yield start, stop, found.numpy()

    def head(self, features: np.ndarray) -> np.ndarray:
        """Logits, float32 (n, n_bits), of what ``run`` returns as features."""
        return self._run("head", features)

    def _run(self, step: str, rows: np.ndarray) -> np.ndarray:
        read = lambda start, stop: as_tensor(rows[start:stop])  # noqa: E731 - one line says it best
        return self._loop(step)(read, len(rows)).numpy()

    def _loop(self, step: str) -> BatchedInference:
        if step not in self._loops:
            self._loops[step] = BatchedInference(
                self._model,
                "features" if step == "features" else "logits",
                batch_rows=self.spec.batch_rows,
                device=self._device,
                pad=True,
                tail_rows=self._tail_rows(),
                half=self._device == "cuda",
                channels_last=self._model.modality == "image" and step != "head",
                module=self._module(step),
            )
        return self._loops[step]

    def _tail_rows(self) -> int | None:
        cuda = self.spec.engine.startswith("cuda")
        return min(TAIL_ROWS[self._model.modality], self.spec.batch_rows) if cuda else None

    def _module(self, step: str) -> Any:
        if step == "head":
            return _Head(self._model)
        if step == "logits" and self._model.modality == "image":
            return _Whole(self._loop("features").module, self._loop("head").module)
        module: Any = OutputModule(self._model, step)
        if self._model.modality == "image" and self.name == "cpu-fused":
            network, n_fused = fuse(self._model.backbone)
            log.debug("%d convolutions fused", n_fused)
            module = _Backbone(self._model, network)
        module = module.eval()
        if self.name == "cpu-compiled":
            # It warns that there is no CUDA, which is why this engine was chosen.
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
            module = torch.compile(module, dynamic=False, options={"freezing": True})
        return module

    def _compile(self) -> None:
        """Runs one row of zeros: compiling happens at the first call."""
        log.info("compiling the model, which takes a minute where nothing is in torch's cache")
        preprocess, width = self._model.spec.preprocess, self._model.spec.n_features
        shape = (3, preprocess.crop, preprocess.crop) if preprocess else (width,)
        try:
            self.run(np.zeros((1, *shape), dtype=np.uint8 if preprocess else np.float32))
        except Exception as error:  # whatever a tool chain can do wrong: a header, a linker, a flag
            raise ModelError(f"the model cannot be compiled here: {error}; leave compile out") from error


def choose_engine(engine: str, modality: str, compile: bool | None = None) -> tuple[str, str]:
    """(name, reason): the engine that a request comes to on this machine.

    ``engine`` is an engine's name, or a device (auto, cpu, cuda) with ``compile`` (None: choose).
    """
    if engine not in (*DEVICES, *ENGINES):
        names = ", ".join((*DEVICES, *ENGINES))
        raise ModelError(f"unknown engine {engine!r}; there are {names}")
    if engine.startswith("cuda") and compile:
        raise ModelError("compile=true is for the CPU; leave it out with device=cuda")
    if engine == "cuda" and not torch.cuda.is_available():
        raise ModelError("cuda was requested, but torch sees no CUDA device here; use device=cpu")
    if engine == "cuda-nvjpeg":
        if modality == "features":
            raise ModelError("decode=nvjpeg is for pictures, and this model takes vectors; leave it out")
        if not torch.cuda.is_available():
            raise ModelError("decode=nvjpeg needs a GPU, but torch sees no CUDA device here; leave it out")
        check_nvjpeg()
        return engine, "as requested"
    if engine in ("auto", "cuda") and torch.cuda.is_available():
        return "cuda", "as requested" if engine == "cuda" else torch.cuda.get_device_name()
    if engine == "cpu-compiled" or (compile and engine not in ("cpu-eager", "cpu-fused")):
        if _compiler() is None:
            raise ModelError("a compiled model was requested, but there is no C++ compiler; install g++")
        return "cpu-compiled", "as requested"
    if engine in ("cpu-eager", "cpu-fused"):
        return engine, "as requested"
    if compile is False:
        return "cpu-eager", "as requested"
    if modality == "features":
        return "cpu-eager", "one or two matrix products: nothing to fuse"
    return "cpu-fused", "the fastest on a CPU"


def _compiler() -> str | None:
    """Path of the C++ compiler that torch.compile would use."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


# ---------------------------------------------------------------- fused convolutions
# Fuses each convolution of a network with the batch normalisation and the activation that follow it.
#
#     convolution → batch norm → ReLU, three passes over memory      ⟶      one oneDNN call with folded weight
#
# In eval mode a batch norm is a scale and a shift per channel, which the weights and bias of the convolution
# before it absorb. oneDNN applies the activation while the convolution's result is in the cache. On a CPU
# this makes convolutional networks about twice as fast, as torch.compile does, but in a tenth of a second and
# without a C++ compiler.


# oneDNN's (name, scalars, algorithm) of the activations that it applies.
ACTIVATIONS: dict[Any, tuple[str, list[float], str]] = {
    nn.ReLU: ("relu", [], ""),
    nn.ReLU6: ("hardtanh", [0.0, 6.0], ""),
    nn.SiLU: ("swish", [], ""),
    nn.Hardswish: ("hardswish", [], ""),
    functional.relu: ("relu", [], ""),
    functional.relu6: ("hardtanh", [0.0, 6.0], ""),
    torch.relu: ("relu", [], ""),
}
NO_ACTIVATION: tuple[str, list[float], str] = ("none", [], "")


def fuse(network: nn.Module) -> tuple[nn.Module, int]:
    """(a network with the same outputs within rounding, its number of fused convolutions).

    ``network`` is in eval mode and stays as it is. Where it cannot be traced, or torch has no oneDNN, it is
    returned itself, with 0.
    """
    if not torch.backends.mkldnn.is_available():
        return network, 0
    try:
        graph = fx.symbolic_trace(network)
    except Exception as error:  # control flow that depends on the data, and whatever else a network may do
        log.debug("the network cannot be traced: %s", error)
        return network, 0
    return _Fusion(graph).run()


class FusedConvolution(nn.Module):
    """conv2d, then an activation, in one call; the weights are laid out for the first input's shape."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor, geometry: _Geometry, activation: tuple[Any, ...]
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight.contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", bias)
        self.geometry, self.activation = geometry, activation
        self._packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_convolution_weight(
                self.weight, *self.geometry, list(x.shape)
            )
        return torch.ops.mkldnn._convolution_pointwise(
            x, self._packed, self.bias, *self.geometry, *self.activation
        )


_Geometry = tuple[list[int], list[int], list[int], int]  # padding, stride, dilation, groups


class _Fusion:
    """One pass over the graph of a traced network."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph, self.modules, self.n_fused = graph, dict(graph.named_modules()), 0

    def run(self) -> tuple[nn.Module, int]:
        for node in list(self.graph.graph.nodes):
            if (found := self._convolution(node)) is not None:
                self._replace(node, *found)
        self.graph.graph.eliminate_dead_code()
        self.graph.recompile()
        return self.graph.eval(), self.n_fused

    def _convolution(self, node: fx.Node) -> tuple[Any, torch.Tensor, torch.Tensor | None, _Geometry] | None:
        """(input, weight, bias, geometry) of a conv2d with fixed padding; None for any other node."""
        module = self._module(node)
        if type(module) is nn.Conv2d and module.padding_mode == "zeros":
            values = (module.weight, module.bias, module.stride, module.padding, module.dilation)
            x, (weight, bias, stride, padding, dilation), groups = node.args[0], values, module.groups
        elif node.op == "call_function" and node.target is torch.conv2d and len(node.args) == 7:
            x, *rest = node.args
            weight, bias, stride, padding, dilation, groups = (self._value(arg) for arg in rest)
        else:
            return None
        if isinstance(padding, str) or not isinstance(weight, torch.Tensor) or weight.dtype != torch.float32:
            return None
        geometry = (_pair(padding), _pair(stride), _pair(dilation), groups)
        return x, weight.detach(), None if bias is None else bias.detach(), geometry

    def _replace(
        self, node: fx.Node, x: Any, weight: torch.Tensor, bias: torch.Tensor | None, geometry: _Geometry
    ) -> None:
        last = node
        shift = torch.zeros(len(weight)) if bias is None else bias
        user = self._only_user(node)
        norm = self._module(user)
        if type(norm) is nn.BatchNorm2d and norm.running_var is not None and norm.running_mean is not None:
            scale = torch.rsqrt(norm.running_var + norm.eps)  # (channels,)
            scale = scale if norm.weight is None else scale * norm.weight.detach()
            weight = weight * scale[:, None, None, None]
            shift = (shift - norm.running_mean) * scale
            shift = shift if norm.bias is None else shift + norm.bias.detach()
            assert user is not None
            last, user = user, self._only_user(user)
        activation = NO_ACTIVATION
        if user is not None:
            kind = type(self._module(user)) if user.op == "call_module" else user.target
            if kind in ACTIVATIONS:
                activation, last = ACTIVATIONS[kind], user
        x, geometry = self._absorb_padding(x, geometry)
        name = f"fused_{self.n_fused}"
        self.graph.add_module(name, FusedConvolution(weight, shift, geometry, activation))
        with self.graph.graph.inserting_before(node):
            fused = self.graph.graph.call_module(name, (x,))
        last.replace_all_uses_with(fused)
        self.n_fused += 1

    def _absorb_padding(self, x: Any, geometry: _Geometry) -> tuple[Any, _Geometry]:
        """The convolution pads by itself what a layer of zeros before it adds equally on both sides."""
        module = self._module(x)
        if type(module) is not nn.ZeroPad2d:
            return x, geometry
        left, right, top, bottom = module.padding
        if left != right or top != bottom:
            return x, geometry
        (height, width), *rest = geometry
        return x.args[0], ([height + top, width + left], *rest)  # type: ignore[return-value]

    def _module(self, node: Any) -> nn.Module | None:
        if isinstance(node, fx.Node) and node.op == "call_module":
            return self.modules.get(str(node.target))
        return None

    def _only_user(self, node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    def _value(self, argument: Any) -> Any:
        """An argument of a call: a number, or the tensor of the network that it names."""
        if not isinstance(argument, fx.Node):
            return argument
        if argument.op != "get_attr":
            return argument  # computed from the input
        found: Any = self.graph
        for name in str(argument.target).split("."):
            found = getattr(found, name)
        return found


def _pair(value: int | tuple[int, ...] | list[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else [int(n) for n in value]
