"""Against InstaHide: a flipped sign leaves a pixel two values; the pixel range, priors and other encodings choose.

The signs act on (x − mean) / std, so an encoded pixel of magnitude a was mean + std·a or mean − std·a before.

1. The encodings are rebuilt from the updates (`fed_images.py`); their absolute values are free of the signs.
2. Where one of the two values is outside [0, 1], the other is true: on dark images that decides most of the bright
   pixels. The rest begin nearest to the mixture of mean images. `cheap` stops there and shows the encoding itself.
3. Of few images with known shares, all signs of every pixel are tried: as many encodings as images, and the solution
   that the other encodings confirm. Of more images, or unknown ones, the mixture is solved as for MixUp (`mixup.py`),
   the signs are chosen again to fit it, and so on in turn.
4. Mirrored at the mean in all images at once, a pixel fits as well. Its neighbours, in all images together, tell
   whether it is mirrored as they are; how frequent values are in public images tells the rest.
"""

from __future__ import annotations

import torch
from pydantic import Field
from scipy.linalg import qr
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, minimum_spanning_tree
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.counters.mixup import Mixture, answer, cannot_decode, decode, unmix
from gradveil.attacks.matching.fed_images import Fed, fed_cost, recover
from gradveil.core.observation import Observation
from gradveil.core.types import Batch
from gradveil.defenses.batch.instahide import InstaHide

ERROR = 0.02  # of an encoding's pixel, when its fit is weighed against how rare the images' pixels are
BINS = 16
CHANGE = 0.01  # mean square between neighbours, where there are no public images
FEW = 10  # images of which every combination of signs is tried
PATTERNS = 2**22  # combinations times encodings times pixels at once
CERTAIN = 10.0  # nats by which two pixels are tied
ROUNDED = 0.02  # how far outside [0, 1] an inexact encoding may put a pixel


@attack("instahide-decode", against=(InstaHide,), version=4)
class InstahideDecode(Attack):
    """Rebuild the encodings, then solve for signs and images in turn.

    Args:
        steps: iterations of the least squares in the pixel range, which cost next to nothing.
        rounds, starts: rounds in which the signs are chosen again, and starts from which each pixel is fitted.
        cheap: only undo the signs.
    Example: gradveil audit --defense instahide --updates 8 --attack instahide-decode:cheap=true
    """

    steps: int = Field(default=1000, ge=1)
    rounds: int = Field(default=15, ge=1)
    starts: int = Field(default=6, ge=2)
    cheap: bool = False

    def cost(self, work: Workload) -> Cost:
        return fed_cost(work)

    def applies(self, observation: Observation) -> str | None:
        return cannot_decode(observation, InstaHide)

    def run(self, target: Target) -> Answer:
        fed = recover(target)
        low, high = both(fed)
        first = nearest(low, high, torch.zeros_like(low))
        if self.cheap:
            return answer(target, fed, first.view_as(fed.x)[fed.sighting == 0])

        habits = Habits(target.knowledge.public)
        middle = fed.target.task.mean.view(-1, 1, 1).expand(fed.x.shape[2:])

        def solve(mixture: Mixture) -> tuple[Tensor, Tensor]:
            x = confirmed(mixture, low, high)
            if x is not None:
                x = mirrored(x, mixture, low, high, middle, habits)
                return x, nearest(low.flatten(1), high.flatten(1), mixture.mixing @ x.flatten(1)).view_as(low)
            return fit(mixture, low, high, self, habits, target.rng)

        return answer(target, fed, decode(fed, first, solve, self.steps))


def both(fed: Fed) -> tuple[Tensor, Tensor]:
    """The two values that each pixel may have had; the same twice where only one is in the range."""
    size, first = fed.x.flatten(0, 1).abs(), fed.target.first
    mean, std = first.task.mean.view(-1, 1, 1), first.task.std.view(-1, 1, 1)
    low, high = mean - std * size, mean + std * size
    return torch.where(low < -ROUNDED, high, low).clamp(0, 1), torch.where(high > 1 + ROUNDED, low, high).clamp(0, 1)


def confirmed(mixture: Mixture, low: Tensor, high: Tensor) -> Tensor | None:
    """Of few images: of all signs of as many encodings, those whose solution fits the others best, pixel by pixel."""
    m, low, high = mixture.mixing, low.flatten(1), high.flatten(1)
    images = m.shape[1]
    if images > FEW or len(m) <= images or int(torch.linalg.matrix_rank(m)) < images:
        return None
    chosen = torch.from_numpy(qr(m.T.numpy(), mode="r", pivoting=True)[1][:images].astype("int64"))
    inverse = torch.linalg.inv(m[chosen].double()).float()
    signs = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * images).view(-1, images, 1)
    parts = []
    for rows in torch.arange(low.shape[1]).split(max(1, PATTERNS // (len(signs) * len(m)))):
        a, b = low[:, rows], high[:, rows]
        x = inverse @ (a[chosen] + signs * (b - a)[chosen])  # signs × images × pixels
        misfit = _misfit(m, x, a, b) + (x - x.clamp(0, 1)).square().sum(1)
        parts.append(x[misfit.argmin(0), :, torch.arange(len(rows))].T)
    x = torch.cat(parts, 1).clamp(0, 1)
    return unmix(mixture, nearest(low, high, m @ x), steps=100)  # by all the encodings


def mirrored(x: Tensor, mixture: Mixture, low: Tensor, high: Tensor, middle: Tensor, habits: Habits) -> Tensor:
    """Every pixel as it is in all images, or mirrored in all of them, whichever is likelier beside its neighbours."""
    m, low, high = mixture.mixing, low.flatten(1), high.flatten(1)
    shape, x, middle = x.shape, x.flatten(1), middle.flatten()
    other = (2 * middle - x).clamp(0, 1)

    # Evidence for each pixel as it is: the encodings, where one of the two values is outside the range; its rarity.
    misfit = _misfit(m, torch.stack([other, x]), low, high)
    itself = (misfit[0] - misfit[1]) / (2 * ERROR**2) + (habits.rarity(other) - habits.rarity(x)).sum(0)
    # Evidence for mirroring neither or both of a pair: a pixel is a vector over the images, and neighbours are alike.
    first, second = _neighbours(shape[1:])
    around = x - middle
    pair = 2 * (around[:, first] * around[:, second]).sum(0) / habits.change

    # Strong ties make clusters, each a tree below one common root; a cluster is mirrored as a whole.
    strong = pair.abs() > CERTAIN
    root, every = len(middle), torch.arange(len(middle))
    ends = torch.cat([first[strong], every]), torch.cat([second[strong], torch.full_like(every, root)])
    loose = torch.cat([1 / pair[strong].abs(), torch.ones(root)])
    graph = csr_matrix((loose.numpy(), (ends[0].numpy(), ends[1].numpy())), shape=(root + 1, root + 1))
    order, above = breadth_first_order(minimum_spanning_tree(graph), root, directed=False)
    sign, cluster = torch.ones(root + 1), torch.arange(root + 1)
    for pixel in order[1:].tolist():
        up = int(above[pixel])
        if up != root:
            along = float((around[:, pixel] * around[:, up]).sum())
            cluster[pixel], sign[pixel] = cluster[up], sign[up] if along > 0 else -sign[up]
    sign, cluster = sign[:-1], cluster[:-1]
    votes = torch.zeros(root).index_add(0, cluster, sign * itself)
    return torch.where((sign > 0) == (votes[cluster] >= 0), x, other).view(shape)


def _misfit(m: Tensor, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How far the encodings of images (any × images × pixels) are from what they may be; any × pixels."""
    made = m @ x
    return torch.minimum((made - low).square(), (made - high).square()).sum(1)


def _neighbours(shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Pairs of places: beside and below each other, and the channels of one pixel."""
    place = torch.arange(shape.numel()).view(shape)
    pairs = [(place[..., 1:], place[..., :-1]), (place[:, 1:], place[:, :-1]), (place[1:], place[:-1])]
    return torch.cat([a.flatten() for a, _ in pairs]), torch.cat([b.flatten() for _, b in pairs])


def fit(
    mixture: Mixture, low: Tensor, high: Tensor, settings: InstahideDecode, habits: Habits, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Images and the encodings with their signs undone, in turn. Pixels are fitted one by one, so each keeps the start
    that fits it best: from black, from the mean, and from random images. All signs reversed fit as well; only the rarity
    of the pixels decides between the two."""
    m, shape, starts = mixture.mixing, mixture.mean.shape, settings.starts
    mean, low, high = (t.flatten(1).repeat(1, starts) for t in (mixture.mean, low, high))
    x = torch.rand(mean.shape, generator=rng)
    pixels = shape[1:].numel()
    x[:, :pixels] = 0
    x[:, pixels : 2 * pixels] = mean[:, :pixels]
    for _ in range(settings.rounds):
        x = unmix(Mixture(m, mean, mixture.victims), nearest(low, high, m @ x), settings.steps // 10)
    encodings = nearest(low, high, m @ x)
    misfit = (m @ x - encodings).square().sum(0) / (2 * ERROR**2) + habits.rarity(x).sum(0)
    best = misfit.view(starts, pixels).argmin(0) * pixels + torch.arange(pixels)
    return x[:, best].view(shape), encodings[:, best].view(-1, *shape[1:])


class Habits:
    """What pixels are like in public images: −log of how frequent a value is, and how much neighbours differ."""

    def __init__(self, public: Batch | None):
        self.change, self.cost = CHANGE, torch.zeros(BINS)
        if public is not None:
            counts = torch.histc(public.x, BINS, 0, 1) + 1
            self.cost = -(counts / counts.sum()).log()
            self.change = float((public.x[..., 1:] - public.x[..., :-1]).square().mean().clamp_min(1e-4))

    def rarity(self, x: Tensor) -> Tensor:
        return self.cost[(x * BINS).long().clamp(0, BINS - 1)]


def nearest(low: Tensor, high: Tensor, to: Tensor) -> Tensor:
    return torch.where((low - to).abs() <= (high - to).abs(), low, high)
