"""Odd forward passes: in place, recomputed, compiled, and written in unusual ways."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from odd_registry import CLASSES, NETS, Written, classifier, conv, net, patches, small
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

# -- in place, recomputed, compiled ------------------------------------------------------------------------------------

NETS["in-place ReLU"] = lambda: conv(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), width=4 * 25)


@net("in-place sums and functions")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = m.embed(x.flatten(1))
        hidden += 0.5
        hidden *= 2
        hidden[:, 0] += 1
        F.relu(hidden, inplace=True)
        placed = torch.zeros(len(x), 16)
        placed[:, :8] = hidden
        return m.head(placed.sigmoid_())

    return Written(forward, embed=nn.Linear(144, 8), head=classifier(16))


@net("in-place changes of the images")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        x = x.clone()
        x[..., 0] = 0
        x -= x.mean((1, 2, 3), keepdim=True)
        return m.net(x)

    return Written(forward, net=conv(width=4 * 25))


@net("checkpoint")
def _() -> nn.Module:
    return Written(
        lambda m, x: m.rest(checkpoint(m.net, x, use_reentrant=False)),
        net=small(),
        rest=nn.Sequential(nn.Flatten(), classifier(100)),
    )


@net("reentrant checkpoint of attention")
def _() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return Written(
        lambda m, x: m.head(checkpoint(m.layer, m.embed(patches(x)), use_reentrant=True).mean(1)),
        embed=nn.Linear(16, 16),
        layer=layer,
        head=classifier(16),
    )


@net("sequential checkpoint")
def _() -> nn.Module:
    net = nn.Sequential(*small(), nn.Flatten(), classifier(100))
    return Written(lambda m, x: checkpoint_sequential(m.net, 2, x, use_reentrant=False), net=net)


NETS["compiled"] = lambda: torch.compile(conv(width=4 * 25), backend="eager")  # type: ignore[return-value]


@net("compiled in place")
def _() -> nn.Module:
    net = conv(width=4 * 25)
    net.compile(backend="aot_eager")
    return net


@net("compiled part and function")
def _() -> nn.Module:
    @torch.compile(backend="aot_eager")
    def squash(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = squash(m.part(x)).flatten(1)
        return m.head(hidden * 2 if hidden.mean() > 0 else hidden)

    return Written(forward, part=torch.compile(small(), backend="aot_eager"), head=classifier(100))


# -- how forward is written --------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls and keeps a running mean in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv(width=100)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        out: Tensor = self.net(x)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out


class InPlaceStatistics(Counting):
    """The same, in place."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        self.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return out - 0.01 * self.mean


NETS["buffers that change"] = Counting
NETS["buffers that change in place"] = InPlaceStatistics


@net("a view as output")
def _() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.Sigmoid(), nn.Linear(8, 6))
    return Written(lambda m, x: m.net(x)[:, ::2].expand(-1, -1).view(len(x), -1)[:, :3], net=net)


@net("list and dictionary of modules")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = x.flatten(1)
        for layer in m.layers:
            hidden = m.functions["tanh" if layer.out_features > 8 else "sigmoid"](layer(hidden))
        return m.functions["head"](hidden)

    layers = nn.ModuleList([nn.Linear(144, 12), nn.Linear(12, 8)])
    functions = nn.ModuleDict(OrderedDict(tanh=nn.Tanh(), sigmoid=nn.Sigmoid(), head=classifier(8)))
    return Written(forward, layers=layers, functions=functions)


@net("list of parameters")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = x.flatten(1)
        for weight in m.weights:
            hidden = torch.tanh(hidden @ weight)
        return hidden

    return Written(forward, weights=nn.ParameterList([torch.randn(144, 8) * 0.1, torch.randn(8, 3) * 0.3]))


@net("two heads, averaged")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = m.net(x).flatten(1)
        return torch.stack([m.first(hidden), m.second(hidden)]).mean(0)

    return Written(forward, net=small(), first=classifier(100), second=classifier(100))


@net("a branch by the data")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = m.net(x).flatten(1)
        return m.head(hidden * 2 if hidden.mean() > 0.4 else hidden)

    return Written(forward, net=small(), head=classifier(100))


@net("a frozen part")
def _() -> nn.Module:
    net = conv(nn.Conv2d(4, 4, 3), nn.Sigmoid(), width=36)
    net[0].requires_grad_(False)
    return net


@net("an unused part")
def _() -> nn.Module:
    return Written(lambda m, x: m.net(x), net=conv(width=100), auxiliary=nn.Linear(7, 7))


@net("double precision")
def _() -> nn.Module:
    return Written(lambda m, x: m.net(x.double()), net=conv(width=100).double())


NETS["double precision throughout"] = lambda: conv(width=100).double()
NETS["half precision"] = lambda: conv(width=100).bfloat16()
NETS["mixed precision"] = lambda: Written(lambda m, x: _autocast(m.net, x), net=conv(width=100))


def _autocast(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out: Tensor = net(x)
    return out.float()


class OldSquare(torch.autograd.Function):
    """A function of the user's in the style of old, which `torch.func` refuses."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, signal):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 2 * x * signal


NETS["a function with its derivative"] = lambda: Written(
    lambda m, x: m.head(OldSquare.apply(m.net(x)).flatten(1)), net=small(), head=classifier(100)
)


@net("bag of embeddings weighed by pixels")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        places = torch.arange(144).expand(len(x), -1)
        return m.head(torch.tanh(F.embedding_bag(places, m.table, per_sample_weights=x.flatten(1), mode="sum")))

    return Written(forward, table=torch.randn(144, 8) * 0.1, head=classifier(8))
