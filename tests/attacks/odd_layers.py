"""Odd layers: attention, recurrent ones, embeddings, shared weights, norms, shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from odd_registry import CLASSES, NETS, SIDE, Written, classifier, conv, net, patches
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

STEPS, WIDTH = 4, 36  # of recurrent networks: three rows of pixels per step

# -- attention ---------------------------------------------------------------------------------------------------------


class ViT(nn.Module):
    """A stock vision transformer: patches, positions, encoder layers of PyTorch, the mean, a classifier."""

    def __init__(self, width: int = 16, depth: int = 1, **settings: object):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.position = nn.Parameter(torch.randn(9, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, **settings)  # type: ignore[arg-type]
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = classifier(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(patches(x)) + self.position).mean(1))


NETS["transformer encoder"] = ViT
NETS["transformer encoder, GELU, norm first"] = lambda: ViT(activation="gelu", norm_first=True)


@net("transformer with dropout")
def _() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return Written(lambda m, x: m.head(m.layer(patches(x))[:, 0]), layer=layer, head=classifier(16))


@net("transformer with a class token, a convolution and dropout")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        patches = m.embed(x).flatten(2).mT
        tokens = torch.cat([m.token.expand(len(x), 1, -1), patches], 1) + m.position
        return m.head(m.encoder(tokens)[:, 0])

    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    parts = {"embed": nn.Conv2d(1, 16, 4, 4), "token": torch.zeros(1, 16), "position": torch.randn(10, 16) * 0.02}
    return Written(forward, **parts, encoder=nn.TransformerEncoder(layer, 2), head=classifier(16))


@net("multi-head attention")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        rows = m.embed(x[:, 0])
        return m.head((rows + m.attention(rows, rows, rows, need_weights=False)[0]).flatten(1))

    parts = {"embed": nn.Linear(SIDE, 8), "attention": nn.MultiheadAttention(8, 2, batch_first=True)}
    return Written(forward, **parts, head=classifier(8 * SIDE))


@net("multi-head attention with weights, sequence first")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        rows = x[:, 0].transpose(0, 1)
        return m.head(m.attention(rows, rows, rows)[0].mean(0))

    return Written(forward, attention=nn.MultiheadAttention(SIDE, 3), head=classifier(SIDE))


@net("scaled dot product attention")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        query, key, value = m.embed(x[:, 0]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return m.head(seen.transpose(1, 2).flatten(1))

    return Written(forward, embed=nn.Linear(SIDE, 24), head=classifier(8 * SIDE))


# -- recurrent ones ----------------------------------------------------------------------------------------------------


def _over_rows(layer: nn.Module, width: int = 8) -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        return m.head(m.layer(x.view(-1, STEPS, WIDTH))[0][:, -1])

    return Written(forward, layer=layer, head=classifier(width))


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

    return Written(forward, cell=cell, head=classifier(8))


NETS["RNN cell"] = lambda: _cells(nn.RNNCell(WIDTH, 8))
NETS["LSTM cell"] = lambda: _cells(nn.LSTMCell(WIDTH, 8))
NETS["GRU cell"] = lambda: _cells(nn.GRUCell(WIDTH, 8))

# -- embeddings, einsum, other sums ------------------------------------------------------------------------------------


@net("embedding of positions")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.embed(patches(x)) + m.position(torch.arange(9))).flatten(1))

    return Written(forward, embed=nn.Linear(16, 8), position=nn.Embedding(9, 8), head=classifier(72))


@net("embedding of quantised pixels")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        levels = ((x[:, 0] + 2) * 2).clamp(0, 7).long()
        return m.head(torch.tanh(m.levels(levels).sum((1, 2)) * 0.1 + m.embed(x.flatten(1))))

    return Written(forward, levels=nn.Embedding(8, 8), embed=nn.Linear(144, 8), head=classifier(8))


@net("embedding of quantised pixels alone")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        return m.head(m.levels(((x[:, 0] + 2) * 2).clamp(0, 7).long()).mean((1, 2)))

    return Written(forward, levels=nn.Embedding(8, 8), head=classifier(8))


@net("einsum")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        return torch.einsum("bhw,hwk,kc->bc", torch.tanh(x[:, 0]), m.first, m.second)

    return Written(forward, first=torch.randn(SIDE, SIDE, 6) * 0.1, second=torch.randn(6, CLASSES))


@net("bilinear")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(m.embed(x.flatten(1)))
        return m.head(hidden, hidden)

    return Written(forward, embed=nn.Linear(144, 8), head=nn.Bilinear(8, 8, CLASSES))


@net("Fourier transform")
def _() -> nn.Module:
    return Written(lambda m, x: m.head(torch.fft.rfft2(x).abs().flatten(1)), head=classifier(84))


@net("distances to centres")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        return -torch.cdist(m.embed(x.flatten(1)), m.centres)

    return Written(forward, embed=nn.Linear(144, 8), centres=torch.randn(CLASSES, 8))


@net("spatial transformer")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        angles = 0.1 * m.locate(x.flatten(1)).view(-1, 2, 3) + torch.eye(2, 3)
        grid = F.affine_grid(angles, [len(x), 1, SIDE, SIDE], align_corners=False)
        return m.head(F.grid_sample(x, grid, align_corners=False).flatten(1))

    return Written(forward, locate=nn.Linear(144, 6), head=classifier(144))


# -- parametrised and shared weights -----------------------------------------------------------------------------------

NETS["weight norm"] = lambda: conv(parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), nn.Sigmoid(), width=36)
NETS["weight norm of old"] = lambda: conv(weight_norm(nn.Conv2d(4, 4, 3)), nn.Sigmoid(), width=36)
NETS["spectral norm"] = lambda: conv(parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)), nn.Sigmoid(), width=36)
NETS["orthogonal weights"] = lambda: nn.Sequential(
    nn.Flatten(), parametrizations.orthogonal(nn.Linear(144, 8)), nn.Tanh(), classifier(8)
)


@net("tied weights")
def _() -> nn.Module:
    first, second, head = nn.Linear(144, 8), nn.Linear(8, 8), classifier(8)
    third = nn.Linear(8, 8)
    third.weight = second.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Tanh(), third, nn.Tanh(), head)


@net("one layer used twice, transposed")
def _() -> nn.Module:
    def forward(m: Written, x: Tensor) -> Tensor:
        hidden = torch.tanh(m.layer(x.flatten(1)))
        back = torch.tanh(F.linear(hidden, m.layer.weight.T))
        return m.head(torch.tanh(m.layer(back)))

    return Written(forward, layer=nn.Linear(144, 8), head=classifier(8))


# -- norms, dropout, activations ---------------------------------------------------------------------------------------

NETS["group norm"] = lambda: conv(nn.GroupNorm(2, 4), width=100)
NETS["layer norm"] = lambda: conv(nn.LayerNorm([4, 5, 5]), width=100)
NETS["instance norm"] = lambda: conv(nn.InstanceNorm2d(4, affine=True), width=100)
NETS["instance norm with statistics"] = lambda: conv(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), width=100)
NETS["batch norm"] = lambda: conv(nn.BatchNorm2d(4), width=100)
NETS["RMS norm"] = lambda: conv(nn.RMSNorm([4, 5, 5]), width=100)
NETS["local response norm"] = lambda: conv(nn.LocalResponseNorm(2), width=100)
NETS["dropout"] = lambda: conv(nn.Dropout2d(0.2), nn.Flatten(), nn.Dropout(0.3), width=100)
NETS["alpha dropout"] = lambda: conv(nn.SELU(), nn.AlphaDropout(0.2), width=100)
NETS["smooth activations"] = lambda: conv(nn.GELU(), nn.SiLU(), nn.Mish(), nn.ELU(), nn.Softplus(), width=100)
NETS["hard activations"] = lambda: conv(nn.Hardswish(), nn.PReLU(4), nn.Hardtanh(), nn.ReLU6(), nn.Hardsigmoid(), width=100)
NETS["random ReLU"] = lambda: conv(nn.RReLU(), width=100)
NETS["gated linear unit"] = lambda: conv(nn.GLU(1), width=50)

# -- shapes ------------------------------------------------------------------------------------------------------------

NETS["pixel shuffle"] = lambda: conv(nn.PixelShuffle(2), width=100)
NETS["nearest upsampling"] = lambda: conv(nn.Upsample(scale_factor=2), width=400)
NETS["bicubic upsampling"] = lambda: conv(nn.Upsample(scale_factor=2, mode="bicubic"), width=400)
NETS["bilinear upsampling"] = lambda: conv(nn.UpsamplingBilinear2d(8), width=256)
NETS["adaptive mean pool"] = lambda: conv(nn.AdaptiveAvgPool2d(2), width=16)
NETS["adaptive max pool"] = lambda: conv(nn.AdaptiveMaxPool2d(2), width=16)
NETS["power pool"] = lambda: conv(nn.LPPool2d(2, 2), width=16)
NETS["reflection padding"] = lambda: conv(nn.ReflectionPad2d(1), width=196)
NETS["transposed convolution"] = lambda: conv(nn.ConvTranspose2d(4, 2, 3), width=98)
NETS["depthwise convolution"] = lambda: conv(nn.Conv2d(4, 4, 3, groups=4), width=36)
NETS["convolution over time"] = lambda: nn.Sequential(
    nn.Flatten(1, 2), nn.Conv1d(12, 4, 3), nn.Tanh(), nn.Flatten(), classifier(40)
)
