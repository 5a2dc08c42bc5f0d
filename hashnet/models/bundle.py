"""The model bundle: a folder with everything that is needed to encode, and nothing that can run code.

    model.safetensors   weights and buffers (pixel and feature standardisation among them)
    history.json        losses by step, where the model was trained by a run
    model.json          how to build the empty model, preprocessing, class names, training summary,
                        and the sha256 of the files; written last, so that it makes the bundle count

``sha256`` of a bundle covers weights, architecture and preprocessing: what decides which code an
input gets. Class names and the summary do not. What a bundle says can be read without torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hashnet.data import PREPROCESS_VERSION, Preprocess
from hashnet.errors import FormatError
from hashnet.io import Artefact, fingerprint, storage

if TYPE_CHECKING:
    from hashnet.models.hash_model import HashModel

WEIGHTS = "model.safetensors"
IDENTITY = ("arguments", "modality", "preprocess", "preprocess_version", "weights_sha256")  # decide the codes


@dataclass(frozen=True)
class BundleInfo:
    """What a bundle says about itself."""

    sha256: str
    n_bits: int
    modality: str
    backbone: str
    n_features: int | None  # width of an input row where the modality is "features"
    preprocess: Preprocess | None
    preprocess_version: str
    class_names: list[str] | None
    summary: dict[str, Any]


class ModelArtefact(Artefact):
    """A model bundle as an artefact of a run."""

    kind, header_file = "model", "model.json"
    made_by = "train one with jobs/train.py"

    def open(self, verify: bool = True) -> tuple[HashModel, BundleInfo]:
        return load_bundle(self.uri, verify)

    def info(self) -> BundleInfo:
        """What the bundle says, without reading its weights."""
        return bundle_info(self.uri)

    def write(self, model: HashModel, **facts: Any) -> str:
        return save_bundle(self.uri, model, **facts)

    def read(self) -> dict[str, Any]:
        values = super().read()
        if values["sha256"] != fingerprint({name: values[name] for name in IDENTITY}):
            raise FormatError(
                f"{self.header_uri} was changed after it was written: its sha256 does not fit its content"
            )
        return values

    def files(self, values: Mapping[str, Any]) -> dict[str, str]:
        return {WEIGHTS: values["weights_sha256"], **(values.get("files") or {})}

    def facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        info = _info(values)
        return {
            "n_bits": info.n_bits,
            "modality": info.modality,
            "sha256": info.sha256,
            "summary": info.summary,
            "backbone": info.backbone,
            "n_classes": len(info.class_names or ()) or None,
            "preprocess": values["preprocess"],
            "preprocess_version": info.preprocess_version,
        }


def save_bundle(
    uri: str,
    model: HashModel,
    *,
    class_names: list[str] | None = None,
    summary: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    lineage: Mapping[str, Any] | None = None,
    files: Sequence[str] = (),
) -> str:
    """Writes the bundle into the folder ``uri`` and returns its sha256.

    ``files`` are others that are there already, such as the history: the header lists their sha256.
    """
    from safetensors.torch import save

    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    weights = save(state)
    preprocess = model.spec.preprocess
    identity = {
        "arguments": model.arguments,
        "modality": model.modality,
        "preprocess": preprocess.to_dict() if preprocess else None,
        "preprocess_version": PREPROCESS_VERSION,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    sha256 = fingerprint(identity)
    storage.write_bytes(storage.join(uri, WEIGHTS), weights)
    ModelArtefact(uri).write_header(
        {
            **identity,
            "n_bits": model.n_bits,
            "class_names": list(class_names) if class_names is not None else None,
            "summary": summary or {},
            "config": config or {},
            "files": {name: storage.sha256_of(storage.join(uri, name)) for name in files},
        },
        sha256=sha256,
        lineage=lineage or {},
    )
    return sha256


def bundle_info(uri: str) -> BundleInfo:
    """What the bundle says, without reading its weights."""
    return _info(ModelArtefact(uri).read())


def load_bundle(uri: str, verify: bool = True) -> tuple[HashModel, BundleInfo]:
    """The model in eval mode, on the CPU, and what the bundle says; damaged weights are refused."""
    import torch
    from safetensors.torch import load

    from hashnet.models.backbones.spec import fit_weights
    from hashnet.models.hash_model import build_model

    artefact = ModelArtefact(uri)
    about = artefact.read()
    weights = artefact.read_file(WEIGHTS) if verify else storage.read_buffer(storage.join(uri, WEIGHTS))
    info = _info(about)
    if info.modality == "image" and info.preprocess_version != PREPROCESS_VERSION:
        raise FormatError(
            f"{uri} was trained with preprocessing version {info.preprocess_version}, this hashnet has "
            f"{PREPROCESS_VERSION}: other pixels would give other codes; use the hashnet that trained it"
        )
    with torch.random.fork_rng(devices=[]):  # building draws random weights; the caller must not notice
        model = build_model(**about["arguments"])
    fit_weights(model, _as_named_now(load(weights.to_pybytes()), info.modality), uri)
    return model.eval(), info


def _as_named_now(state: dict[str, Any], modality: str) -> dict[str, Any]:
    """The tensors of a bundle by today's names: a hidden layer was once the backbone of vectors."""
    if modality != "features" or "backbone.layers.0.weight" not in state:
        return state
    prefixes = (("backbone.layers.", "head.hidden."), ("head.", "head.head."))
    return {
        next((new + name.removeprefix(old) for old, new in prefixes if name.startswith(old)), name): tensor
        for name, tensor in state.items()
    }


def _info(about: Mapping[str, Any]) -> BundleInfo:
    arguments, preprocess = about["arguments"], about["preprocess"]
    return BundleInfo(
        sha256=about["sha256"],
        n_bits=about["n_bits"],
        modality=about["modality"],
        backbone=arguments["backbone"],
        n_features=arguments["n_features"],
        preprocess=Preprocess.from_dict(preprocess) if preprocess else None,
        preprocess_version=about["preprocess_version"],
        class_names=about["class_names"],
        summary=about["summary"],
    )
