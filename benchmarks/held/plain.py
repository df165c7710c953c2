"""Modules and losses of torch.nn, drawn; convolutions of PyG, drawn; and snippets as people write them.

The idea: a drawn module is put between two linear layers. How to call its constructor and what shape to feed is found by
trying a few common ways, so none is known by name.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.held.made import CLASSES, SAMPLES, Made, NotBuilt, class_loss, first_tensor

__all__ = ["graph_names", "loss_names", "make_graph", "make_loss", "make_module", "module_names"]

WIDTH = 8
_CONTAINERS = {"Module", "Container", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict",
               "CrossMapLRN2d", "RNNBase"}  # fmt: skip


def _all(ending: str) -> list[str]:
    return [n for n in nn.modules.__all__ if n.endswith("Loss") == (ending == "Loss") and n not in _CONTAINERS]


def module_names() -> list[str]:
    return sorted(f"nn:{n}" for n in _all("") if not n.startswith("Lazy"))


def loss_names() -> list[str]:
    return sorted(f"loss:{n}" for n in _all("Loss"))


class Between(nn.Module):
    """Linear, the module, whatever it returns pooled to a vector, linear. The input is shaped for the module."""

    def __init__(self, inner: nn.Module, shape: tuple[int, ...], out: int, times: int) -> None:
        super().__init__()
        self.shape, self.times = shape, times
        wide = int(torch.tensor(shape).prod())
        self.before, self.hidden = nn.Linear(6, wide), nn.Linear(wide, wide)
        self.inner, self.after = inner, nn.Linear(out, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(F.gelu(self.before(x))).reshape(-1, *self.shape)
        return self.after(first_tensor(self.inner(*[h] * self.times)).flatten(1))


_WAYS: tuple[tuple[Any, ...], ...] = (
    (WIDTH, WIDTH), (WIDTH,), (WIDTH, WIDTH, 3), (2, WIDTH), (2,), (3,), (WIDTH, 2), (WIDTH, WIDTH, WIDTH), (), (0.3, 0.6),
)  # fmt: skip
_SHAPES = ((WIDTH,), (5, WIDTH), (WIDTH, 6), (WIDTH, 6, 6), (WIDTH, 4, 4, 4))


def make_module(name: str) -> Made:
    kind = getattr(nn, name.split(":")[1])
    for shape, way, times in itertools.product(_SHAPES, _WAYS, (1, 2, 3)):
        try:
            torch.manual_seed(7)
            with torch.no_grad():
                out = first_tensor(kind(*way)(*[torch.randn(3, *shape)] * times))
            if out.shape[0] != 3 or out.dim() < 2 or not out.is_floating_point():
                continue
            torch.manual_seed(7)
            model = Between(kind(*way), shape, out[0].numel(), times)
            g = torch.Generator().manual_seed(4)
            data = [(torch.randn(6, generator=g), i % CLASSES) for i in range(SAMPLES)]
            class_loss(model(torch.zeros(2, 6)), torch.zeros(2, dtype=torch.long)).backward()
        except Exception:  # another way to call it
            continue
        model.zero_grad()
        torch.manual_seed(7)
        return Made(Between(kind(*way), shape, out[0].numel(), times), class_loss, data)
    raise NotBuilt("none of the ways to call it that were tried works")


class Net(nn.Module):
    def __init__(self, out: int = CLASSES, steps: int = 0) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 12)
        )
        self.head = nn.Linear(12, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


class Sigmoided(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


class Steps(Net):
    """(steps, samples, classes) in log-probabilities, as CTC wants them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).reshape(x.shape[0], 6, CLASSES).transpose(0, 1).log_softmax(-1)


def make_loss(name: str) -> Made:
    """The loss in each common way: classes, a number, a vector, a pair; the first that runs is taken."""
    kind = getattr(nn, name.split(":")[1])
    g = torch.Generator().manual_seed(4)
    inputs = [torch.randn(6, generator=g) for _ in range(SAMPLES)]
    vectors = [torch.rand(CLASSES, generator=g) for _ in range(SAMPLES)]
    if kind is nn.CTCLoss:

        def ctc(output: Any, y: Any) -> torch.Tensor:
            steps = torch.full((y.shape[0],), 6)
            loss: torch.Tensor = kind()(output, y, steps, torch.full((y.shape[0],), 2))
            return loss

        return Made(Steps(6 * CLASSES), ctc, [(x, torch.tensor([1 + i % 3, 2])) for i, x in enumerate(inputs)])
    targets: tuple[list[Any], ...] = (
        [i % CLASSES for i in range(SAMPLES)],
        vectors,
        [(v > 0.5).long() for v in vectors],
        [float(2 * (i % 2) - 1) for i in range(SAMPLES)],
    )
    for model_class, target in itertools.product((Net, Sigmoided), targets):
        for call in (
            lambda out, y: kind()(out, y),
            lambda out, y: kind()(out, y, out.exp()),
            lambda out, y: kind()(out, out.flip(1), y),
            lambda out, y: kind()(out[:, 0], out[:, 1], y),
            lambda out, y: kind(CLASSES, 8, [2])(out, y).loss,
        ):
            try:
                torch.manual_seed(7)
                model = model_class()
                y = torch.stack([torch.as_tensor(t) for t in target[:3]])
                loss = call(model(torch.stack(inputs[:3])), y)
                if loss.dim() or not loss.isfinite():
                    continue
                loss.backward()
            except Exception:  # another way
                continue
            torch.manual_seed(7)
            return Made(model_class(), call, list(zip(inputs, target)))
    raise NotBuilt("none of the ways to call it that were tried works")


NODES, FEATURES = 6, 8
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2, 4, 1], [1, 2, 3, 4, 5, 0, 3, 5, 1, 4]])


class Graphs(nn.Module):
    """Two convolutions over a batch of graphs with the same edges, mean over nodes, a linear layer."""

    def __init__(self, kind: type, options: dict[str, Any], extras: tuple[str, ...], width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, FEATURES)
        self.first, self.second = kind(**options), kind(**options)
        self.head, self.extras = nn.Linear(width, CLASSES), extras
        self.weights = nn.Parameter(torch.rand(EDGES.shape[1]))
        self.marks = nn.Parameter(torch.rand(EDGES.shape[1], FEATURES))

    def apply_to(self, conv: nn.Module, h: torch.Tensor, graphs: int) -> torch.Tensor:
        offsets = (torch.arange(graphs, device=h.device) * NODES).repeat_interleave(EDGES.shape[1])
        edges = EDGES.to(h.device).repeat(1, graphs) + offsets
        given = {"edge_weight": self.weights.repeat(graphs), "edge_attr": self.marks.repeat(graphs, 1), "x_0": h,
                 "pos": h[:, :3], "edge_type": torch.zeros_like(edges[0])}  # fmt: skip
        return first_tensor(conv(h, edges, **{k: given[k] for k in self.extras}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graphs = x.shape[0]
        h = self.embed(x).reshape(graphs * NODES, FEATURES)
        for conv in (self.first, self.second):
            h = F.relu(self.apply_to(conv, h, graphs))
        return self.head(h.reshape(graphs, NODES, -1).mean(1))


def graph_names() -> list[str]:
    from torch_geometric.nn import conv

    return sorted(f"pyg:{n}" for n in conv.__all__ if n.endswith("Conv"))


def make_graph(name: str) -> Made:
    from torch_geometric.nn import conv

    kind = getattr(conv, name.split(":")[1])
    known = inspect.signature(kind.__init__).parameters
    mlp = lambda *sizes: nn.Sequential(nn.Linear(sizes[0], 16), nn.ReLU(), nn.Linear(16, sizes[1]))  # noqa: E731
    every: dict[str, Any] = {
        "in_channels": FEATURES, "out_channels": FEATURES, "channels": FEATURES, "hidden_channels": FEATURES, "K": 2, "k": 2,
        "num_layers": 2, "alpha": 0.1, "num_relations": 1, "edge_dim": FEATURES, "dim": FEATURES, "kernel_size": 2,
        "num_heads": 2, "heads": 1, "eps": 0.1,
    }  # fmt: skip
    required = [
        n for n, p in known.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and n != "self"
    ]
    options = {n: every[n] for n in required if n in every}
    if "nn" in required:
        options["nn"] = mlp(2 * FEATURES if "Edge" in name else FEATURES, FEATURES * (FEATURES if "NN" in name else 1))
    if missing := set(required) - set(options):
        raise NotBuilt(f"its constructor needs {', '.join(sorted(missing))}")
    if "edge_dim" in known and "edge_attr" in inspect.signature(kind.forward).parameters:
        options["edge_dim"] = FEATURES
    asked = inspect.signature(kind.forward).parameters
    extras = tuple(n for n in ("edge_weight", "edge_attr", "x_0", "pos", "edge_type") if n in asked)
    for chosen in (extras, tuple(e for e in extras if asked[e].default is inspect.Parameter.empty)):
        try:
            torch.manual_seed(7)
            model = Graphs(kind, options, chosen, FEATURES)
            model(torch.randn(2, NODES, 4)).sum().backward()
        except Exception:  # without what it does not insist on
            continue
        torch.manual_seed(7)
        if "nn" in options:
            options["nn"] = mlp(
                2 * FEATURES if "Edge" in name else FEATURES, FEATURES * (FEATURES if "NN" in name else 1)
            )
        g = torch.Generator().manual_seed(4)
        data = [(torch.randn(NODES, 4, generator=g), i % CLASSES) for i in range(SAMPLES)]
        return Made(Graphs(kind, options, chosen, FEATURES), class_loss, data)
    raise NotBuilt("none of the ways to call it that were tried works")
