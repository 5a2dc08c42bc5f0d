"""A backbone divided in two: what lies below its last blocks, and these blocks themselves.

    parts = divide(model.backbone, 2, model.spec.preprocess.crop)
    parts.upper(parts.lower(pixels))           # the backbone's own features; both share its weights

A block is what a network's author repeats: a residual block, an MBConv, a layer of AlexNet. It ends where a
single tensor is passed on, and holds at least one convolution or matrix; normalisation, activations
and pooling belong to the block before them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from hashnet.errors import ModelError

LARGE = 0.5  # share of the weights: a module with more of them is a wrapper, not a block


@dataclass(frozen=True)
class DividedBackbone:
    """``lower`` gives activations of ``shape`` (one row's), ``upper`` makes features of them."""

    lower: nn.Module
    upper: nn.Module
    shape: tuple[int, ...]


def divide(backbone: nn.Module, n_last: int, crop: int) -> DividedBackbone:
    """The backbone below its last ``n_last`` blocks, and these; ModelError where that cannot be done.

    Both parts are traced in eval mode: what a network's code does in training only, such as stochastic depth
    (layers of dropout and normalisation apart), is left out.
    """
    was_training = backbone.training
    try:
        graph = fx.symbolic_trace(backbone.eval())
    except Exception as error:  # control flow that depends on the data, and whatever else a network may do
        raise ModelError(
            f"the backbone cannot be divided into blocks ({error}); leave train_last out"
        ) from error
    finally:
        backbone.train(was_training)
    cuts = _cuts(graph, backbone)
    if n_last > len(cuts):
        raise ModelError(
            f"train_last={n_last}, but the backbone has {len(cuts) + 1} blocks; train_last must be at most "
            f"{len(cuts)}, or be left out to train all of them"
        )
    cut = cuts[-n_last]
    lower, upper = _part(graph, cut, upper=False), _part(graph, cut, upper=True)
    with torch.no_grad():
        shape = lower.eval()(torch.zeros(1, 3, crop, crop)).shape[1:]
    return DividedBackbone(lower, upper, tuple(shape))


def _cuts(graph: fx.GraphModule, backbone: nn.Module) -> list[fx.Node]:
    """The last node of every block but the last."""
    blocks = _Blocks(backbone)
    nodes = [node for node in graph.graph.nodes if node.op not in ("get_attr", "output")]
    place = {node: i for i, node in enumerate(nodes)}
    last_use = {node: max((place.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes}
    cuts, block, reach = [], None, -1  # reach: the last use of any earlier node
    for i, node in enumerate(nodes[1:]):
        before = nodes[i]
        found = blocks.of(node)
        begins = found is not None and found != block
        if begins and block is not None and reach <= i:
            cuts.append(before)
        block = found if begins else block
        reach = max(reach, last_use[before])
    return cuts


class _Blocks:
    """Which block a call belongs to."""

    def __init__(self, backbone: nn.Module) -> None:
        self.root = backbone  # a traced copy has lost the types of its containers
        self.total = sum(p.numel() for p in backbone.parameters())

    def of(self, node: fx.Node) -> str | None:
        """The name of the block; None for what has no matrix of weights and belongs to the block before."""
        target = str(node.target) if node.op == "call_module" else self._of_weights(node)
        if target is None:
            return None
        module = self.root
        path: list[str] = []
        for name in target.split("."):
            if module is not self.root and not self._is_wrapper(module):
                break
            module = module.get_submodule(name)
            path.append(name)
        return ".".join(path) if any(p.ndim > 1 for p in module.parameters()) else None

    def _of_weights(self, node: fx.Node) -> str | None:
        """The module whose weights a function takes: so does a convolution that pads in its own way."""
        weights = [str(used.target) for used in node.all_input_nodes if used.op == "get_attr"]
        return weights[0].rpartition(".")[0] or None if weights else None

    def _is_wrapper(self, module: nn.Module) -> bool:
        large = sum(p.numel() for p in module.parameters()) > LARGE * self.total
        return type(module) in (nn.Sequential, nn.ModuleList) or (large and any(module.children()))


def _part(traced: fx.GraphModule, cut: fx.Node, *, upper: bool) -> fx.GraphModule:
    """The calls up to ``cut``, or those after it, as a module that shares the traced network's weights."""
    order = list(traced.graph.nodes)
    after = order.index(cut) + 1
    calls = {node for node in (order[after:] if upper else order[:after]) if node.op != "get_attr"}
    graph, copies = fx.Graph(), {}
    if upper:
        copies[cut] = graph.placeholder("activations")
    for node in order:
        if node in calls or (node.op == "get_attr" and not calls.isdisjoint(node.users)):
            copies[node] = graph.node_copy(node, lambda used: copies[used])
    if not upper:
        graph.output(copies[cut])
    return fx.GraphModule(traced, graph)
