"""Odd but common modules: one tiny network per entry, on images of 1 × 12 × 12 with three classes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

SIDE, CLASSES = 12, 3
STEPS, WIDTH = 4, 36  # of recurrent networks: three rows of pixels per step
NETS: dict[str, Callable[[], nn.Module]] = {}


def build(name: str) -> nn.Module:
    """The network with the weights that a fixed seed gives."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return NETS[name]()


def _net(name: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        NETS[name] = make
        return make

    return register


def _patches(x: Tensor, size: int = 4) -> Tensor:
    """Images as rows of square patches: images × patches × pixels."""
    return F.unfold(x, size, stride=size).mT


class Written(nn.Module):
    """A network whose forward pass is one function of its parts and the images."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module | Tensor):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
        self.written = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def _conv(*layers: nn.Module, width: int = 4 * 16) -> nn.Sequential:
    """A strided convolution (4 × 4 × 4), the layers, and a classifier of `width` features."""
    return nn.Sequential(nn.Conv2d(1, 4, 5, 2, 1), nn.Sigmoid(), *layers, nn.Flatten(), nn.Linear(width, CLASSES))


def _small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 5, 2, 1), nn.Sigmoid())


def _classifier(width: int) -> nn.Linear:
    return nn.Linear(width, CLASSES)


# -- attention ---------------------------------------------------------------------------------------------------------


class ViT(nn.Module):
    """A stock vision transformer: patches, positions, encoder layers of PyTorch, the mean, a classifier."""

    def __init__(self, width: int = 16, depth: int = 1, **settings: object):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.position = nn.Parameter(torch.randn(9, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, **settings)  # type: ignore[arg-type]
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = _classifier(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(_patches(x)) + self.position).mean(1))


NETS["transformer encoder"] = ViT
NETS["transformer encoder, GELU, norm first"] = lambda: ViT(activation="gelu", norm_first=True)


@_net("transformer with dropout")
def _() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return Written(lambda m, x: m.head(m.layer(_patches(x))[:, 0]), layer=layer, head=_classifier(16))


@_net("transformer with a class token, a convolution and dropout")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        patches = m.embed(x).flatten(2).mT
        tokens = torch.cat([m.token.expand(len(x), 1, -1), patches], 1) + m.position
        return m.head(m.encoder(tokens)[:, 0])

    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    parts = {"embed": nn.Conv2d(1, 16, 4, 4), "token": torch.zeros(1, 16), "position": torch.randn(10, 16) * 0.02}
    return Written(forward, **parts, encoder=nn.TransformerEncoder(layer, 2), head=_classifier(16))


@_net("multi-head attention")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        rows = m.embed(x[:, 0])
        return m.head((rows + m.attention(rows, rows, rows, need_weights=False)[0]).flatten(1))

    parts = {"embed": nn.Linear(SIDE, 8), "attention": nn.MultiheadAttention(8, 2, batch_first=True)}
    return Written(forward, **parts, head=_classifier(8 * SIDE))


@_net("multi-head attention with weights, sequence first")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        rows = x[:, 0].transpose(0, 1)
        return m.head(m.attention(rows, rows, rows)[0].mean(0))

    return Written(forward, attention=nn.MultiheadAttention(SIDE, 3), head=_classifier(SIDE))


@_net("scaled dot product attention")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        query, key, value = m.embed(x[:, 0]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return m.head(seen.transpose(1, 2).flatten(1))

    return Written(forward, embed=nn.Linear(SIDE, 24), head=_classifier(8 * SIDE))


# -- recurrent ones ----------------------------------------------------------------------------------------------------


def _over_rows(layer: nn.Module, width: int = 8) -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        return m.head(m.layer(x.view(-1, STEPS, WIDTH))[0][:, -1])

    return Written(forward, layer=layer, head=_classifier(width))


NETS["RNN"] = lambda: _over_rows(nn.RNN(WIDTH, 8, batch_first=True))
NETS["LSTM"] = lambda: _over_rows(nn.LSTM(WIDTH, 8, batch_first=True))
NETS["LSTM, two layers in both directions"] = lambda: _over_rows(nn.LSTM(WIDTH, 8, 2, batch_first=True, bidirectional=True), 16)
NETS["LSTM with projection"] = lambda: _over_rows(nn.LSTM(WIDTH, 8, batch_first=True, proj_size=4), 4)
NETS["GRU"] = lambda: _over_rows(nn.GRU(WIDTH, 8, batch_first=True))


def _cells(cell: nn.Module) -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        state = None
        for rows in x.view(-1, STEPS, WIDTH).unbind(1):
            state = m.cell(rows, state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    return Written(forward, cell=cell, head=_classifier(8))


NETS["RNN cell"] = lambda: _cells(nn.RNNCell(WIDTH, 8))
NETS["LSTM cell"] = lambda: _cells(nn.LSTMCell(WIDTH, 8))
NETS["GRU cell"] = lambda: _cells(nn.GRUCell(WIDTH, 8))

# -- embeddings, einsum, other sums ------------------------------------------------------------------------------------


@_net("embedding of positions")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.embed(_patches(x)) + m.position(torch.arange(9))).flatten(1))

    return Written(forward, embed=nn.Linear(16, 8), position=nn.Embedding(9, 8), head=_classifier(72))


@_net("embedding of quantised pixels")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        levels = ((x[:, 0] + 2) * 2).clamp(0, 7).long()
        return m.head(torch.tanh(m.levels(levels).sum((1, 2)) * 0.1 + m.embed(x.flatten(1))))

    return Written(forward, levels=nn.Embedding(8, 8), embed=nn.Linear(144, 8), head=_classifier(8))


@_net("embedding of quantised pixels alone")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        return m.head(m.levels(((x[:, 0] + 2) * 2).clamp(0, 7).long()).mean((1, 2)))

    return Written(forward, levels=nn.Embedding(8, 8), head=_classifier(8))


@_net("einsum")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        return torch.einsum("bhw,hwk,kc->bc", torch.tanh(x[:, 0]), m.first, m.second)

    return Written(forward, first=torch.randn(SIDE, SIDE, 6) * 0.1, second=torch.randn(6, CLASSES))


@_net("bilinear")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(m.embed(x.flatten(1)))
        return m.head(hidden, hidden)

    return Written(forward, embed=nn.Linear(144, 8), head=nn.Bilinear(8, 8, CLASSES))


@_net("Fourier transform")
def _() -> nn.Module:
    return Written(lambda m, x: m.head(torch.fft.rfft2(x).abs().flatten(1)), head=_classifier(84))


@_net("distances to centres")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        return -torch.cdist(m.embed(x.flatten(1)), m.centres)

    return Written(forward, embed=nn.Linear(144, 8), centres=torch.randn(CLASSES, 8))


@_net("spatial transformer")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        angles = 0.1 * m.locate(x.flatten(1)).view(-1, 2, 3) + torch.eye(2, 3)
        grid = F.affine_grid(angles, [len(x), 1, SIDE, SIDE], align_corners=False)
        return m.head(F.grid_sample(x, grid, align_corners=False).flatten(1))

    return Written(forward, locate=nn.Linear(144, 6), head=_classifier(144))


# -- in place, recomputed, compiled ------------------------------------------------------------------------------------

NETS["in-place ReLU"] = lambda: _conv(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), width=4 * 25)


@_net("in-place sums and functions")
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

    return Written(forward, embed=nn.Linear(144, 8), head=_classifier(16))


@_net("in-place changes of the images")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        x = x.clone()
        x[..., 0] = 0
        x -= x.mean((1, 2, 3), keepdim=True)
        return m.net(x)

    return Written(forward, net=_conv(width=4 * 25))


@_net("checkpoint")
def _() -> nn.Module:
    return Written(
        lambda m, x: m.rest(checkpoint(m.net, x, use_reentrant=False)),
        net=_small(),
        rest=nn.Sequential(nn.Flatten(), _classifier(100)),
    )


@_net("reentrant checkpoint of attention")
def _() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return Written(
        lambda m, x: m.head(checkpoint(m.layer, m.embed(_patches(x)), use_reentrant=True).mean(1)),
        embed=nn.Linear(16, 16),
        layer=layer,
        head=_classifier(16),
    )


@_net("sequential checkpoint")
def _() -> nn.Module:
    net = nn.Sequential(*_small(), nn.Flatten(), _classifier(100))
    return Written(lambda m, x: checkpoint_sequential(m.net, 2, x, use_reentrant=False), net=net)


NETS["compiled"] = lambda: torch.compile(_conv(width=4 * 25), backend="eager")  # type: ignore[return-value]


@_net("compiled in place")
def _() -> nn.Module:
    net = _conv(width=4 * 25)
    net.compile(backend="aot_eager")
    return net


@_net("compiled part and function")
def _() -> nn.Module:
    @torch.compile(backend="aot_eager")
    def squash(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = squash(m.part(x)).flatten(1)
        return m.head(hidden * 2 if hidden.mean() > 0 else hidden)

    return Written(forward, part=torch.compile(_small(), backend="aot_eager"), head=_classifier(100))


# -- parametrised and shared weights -----------------------------------------------------------------------------------

NETS["weight norm"] = lambda: _conv(parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), nn.Sigmoid(), width=36)
NETS["weight norm of old"] = lambda: _conv(weight_norm(nn.Conv2d(4, 4, 3)), nn.Sigmoid(), width=36)
NETS["spectral norm"] = lambda: _conv(parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)), nn.Sigmoid(), width=36)
NETS["orthogonal weights"] = lambda: nn.Sequential(
    nn.Flatten(), parametrizations.orthogonal(nn.Linear(144, 8)), nn.Tanh(), _classifier(8)
)


@_net("tied weights")
def _() -> nn.Module:
    first, second, head = nn.Linear(144, 8), nn.Linear(8, 8), _classifier(8)
    third = nn.Linear(8, 8)
    third.weight = second.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Tanh(), third, nn.Tanh(), head)


@_net("one layer used twice, transposed")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = torch.tanh(m.layer(x.flatten(1)))
        back = torch.tanh(F.linear(hidden, m.layer.weight.T))
        return m.head(torch.tanh(m.layer(back)))

    return Written(forward, layer=nn.Linear(144, 8), head=_classifier(8))


# -- norms, dropout, activations ---------------------------------------------------------------------------------------

NETS["group norm"] = lambda: _conv(nn.GroupNorm(2, 4), width=100)
NETS["layer norm"] = lambda: _conv(nn.LayerNorm([4, 5, 5]), width=100)
NETS["instance norm"] = lambda: _conv(nn.InstanceNorm2d(4, affine=True), width=100)
NETS["instance norm with statistics"] = lambda: _conv(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), width=100)
NETS["batch norm"] = lambda: _conv(nn.BatchNorm2d(4), width=100)
NETS["RMS norm"] = lambda: _conv(nn.RMSNorm([4, 5, 5]), width=100)
NETS["local response norm"] = lambda: _conv(nn.LocalResponseNorm(2), width=100)
NETS["dropout"] = lambda: _conv(nn.Dropout2d(0.2), nn.Flatten(), nn.Dropout(0.3), width=100)
NETS["alpha dropout"] = lambda: _conv(nn.SELU(), nn.AlphaDropout(0.2), width=100)
NETS["smooth activations"] = lambda: _conv(nn.GELU(), nn.SiLU(), nn.Mish(), nn.ELU(), nn.Softplus(), width=100)
NETS["hard activations"] = lambda: _conv(nn.Hardswish(), nn.PReLU(4), nn.Hardtanh(), nn.ReLU6(), nn.Hardsigmoid(), width=100)
NETS["random ReLU"] = lambda: _conv(nn.RReLU(), width=100)
NETS["gated linear unit"] = lambda: _conv(nn.GLU(1), width=50)

# -- shapes ------------------------------------------------------------------------------------------------------------

NETS["pixel shuffle"] = lambda: _conv(nn.PixelShuffle(2), width=100)
NETS["nearest upsampling"] = lambda: _conv(nn.Upsample(scale_factor=2), width=400)
NETS["bicubic upsampling"] = lambda: _conv(nn.Upsample(scale_factor=2, mode="bicubic"), width=400)
NETS["bilinear upsampling"] = lambda: _conv(nn.UpsamplingBilinear2d(8), width=256)
NETS["adaptive mean pool"] = lambda: _conv(nn.AdaptiveAvgPool2d(2), width=16)
NETS["adaptive max pool"] = lambda: _conv(nn.AdaptiveMaxPool2d(2), width=16)
NETS["power pool"] = lambda: _conv(nn.LPPool2d(2, 2), width=16)
NETS["reflection padding"] = lambda: _conv(nn.ReflectionPad2d(1), width=196)
NETS["transposed convolution"] = lambda: _conv(nn.ConvTranspose2d(4, 2, 3), width=98)
NETS["depthwise convolution"] = lambda: _conv(nn.Conv2d(4, 4, 3, groups=4), width=36)
NETS["convolution over time"] = lambda: nn.Sequential(
    nn.Flatten(1, 2), nn.Conv1d(12, 4, 3), nn.Tanh(), nn.Flatten(), _classifier(40)
)


# -- how forward is written --------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls and keeps a running mean in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _conv(width=100)
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


@_net("a view as output")
def _() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.Sigmoid(), nn.Linear(8, 6))
    return Written(lambda m, x: m.net(x)[:, ::2].expand(-1, -1).view(len(x), -1)[:, :3], net=net)


@_net("list and dictionary of modules")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = x.flatten(1)
        for layer in m.layers:
            hidden = m.functions["tanh" if layer.out_features > 8 else "sigmoid"](layer(hidden))
        return m.functions["head"](hidden)

    layers = nn.ModuleList([nn.Linear(144, 12), nn.Linear(12, 8)])
    functions = nn.ModuleDict(OrderedDict(tanh=nn.Tanh(), sigmoid=nn.Sigmoid(), head=_classifier(8)))
    return Written(forward, layers=layers, functions=functions)


@_net("list of parameters")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = x.flatten(1)
        for weight in m.weights:
            hidden = torch.tanh(hidden @ weight)
        return hidden

    return Written(forward, weights=nn.ParameterList([torch.randn(144, 8) * 0.1, torch.randn(8, 3) * 0.3]))


@_net("two heads, averaged")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = m.net(x).flatten(1)
        return torch.stack([m.first(hidden), m.second(hidden)]).mean(0)

    return Written(forward, net=_small(), first=_classifier(100), second=_classifier(100))


@_net("a branch by the data")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = m.net(x).flatten(1)
        return m.head(hidden * 2 if hidden.mean() > 0.4 else hidden)

    return Written(forward, net=_small(), head=_classifier(100))


@_net("a frozen part")
def _() -> nn.Module:
    net = _conv(nn.Conv2d(4, 4, 3), nn.Sigmoid(), width=36)
    net[0].requires_grad_(False)
    return net


@_net("an unused part")
def _() -> nn.Module:
    return Written(lambda m, x: m.net(x), net=_conv(width=100), auxiliary=nn.Linear(7, 7))


@_net("double precision")
def _() -> nn.Module:
    return Written(lambda m, x: m.net(x.double()), net=_conv(width=100).double())


NETS["double precision throughout"] = lambda: _conv(width=100).double()
NETS["half precision"] = lambda: _conv(width=100).bfloat16()
NETS["mixed precision"] = lambda: Written(lambda m, x: _autocast(m.net, x), net=_conv(width=100))


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
    lambda m, x: m.head(OldSquare.apply(m.net(x)).flatten(1)), net=_small(), head=_classifier(100)
)


@_net("bag of embeddings weighed by pixels")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        places = torch.arange(144).expand(len(x), -1)
        return m.head(torch.tanh(F.embedding_bag(places, m.table, per_sample_weights=x.flatten(1), mode="sum")))

    return Written(forward, table=torch.randn(144, 8) * 0.1, head=_classifier(8))


NO_SECOND_DERIVATIVE = {"bag of embeddings weighed by pixels": "PyTorch has no second derivative of embedding_bag"}
