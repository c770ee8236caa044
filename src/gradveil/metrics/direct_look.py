"""The direct look: does anything that is sent resemble the private images as it stands?

Attacks take an update for a gradient, but a defense may send anything: an image in a slice of a tensor, in an additional
tensor, in the low bits of numbers. Here every window of every sent tensor is compared with the images, in several readings.
That uses the truth. So the same maximum is taken for strangers, and a likeness counts only as far as it is beyond theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from gradveil.core.loops import Loop
from gradveil.core.progress import Steps
from gradveil.core.results import Sight
from gradveil.core.types import Tensors, widened
from gradveil.metrics.leak_test import Slots

VERSION = 3  # to be raised when results change
ENOUGH_VALUES, MOST_VALUES = 2**17, 2**19  # of one reading; more than enough where two images per tensor need it
MOST_PAIRS = 16  # of tensors that are compared with each other
BLOCK = 2**19  # correlations at a time: as many as a core's cache holds
OUTLYING = 6.0  # standard deviations above the median from which on a likeness counts
LEAST_DEVIATION = 0.005  # of the transformed correlations of images that resemble nothing
FLAT = 1e-9  # share of the energy of its block below which a window is constant except for rounding
SMALL = 1e-3  # share of the largest value below which values are looked at for themselves
BITS = (1, 4, 8, 16)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per number


@dataclass(frozen=True)
class Reading:
    """All tensors in one way of reading them, one behind the other: an image may lie across two of them."""

    name: str
    tensors: tuple[str, ...]
    values: tuple[Tensor, ...]  # one axis each

    @property
    def signal(self) -> Tensor:
        joined = torch.cat([v.double() for v in self.values]) if self.values else torch.zeros(0, dtype=torch.float64)
        joined = joined.nan_to_num(0.0, 0.0, 0.0)
        return joined / joined.abs().max().clamp(min=torch.finfo(torch.float64).tiny) if len(joined) else joined

    def tensor_at(self, place: int) -> str:
        ends = torch.tensor([len(v) for v in self.values]).cumsum(0)
        return self.tensors[int(torch.searchsorted(ends, place, right=True))]


def direct_look(
    sent: Sequence[Sequence[Tensors]], state: Tensors, images: Tensor, slots: Slots, progress: Steps | None = None
) -> tuple[Tensor, list[Sight]]:
    """Batches × images: how surely each image is seen in anything that was sent for the batch.

    And for every victim where it is largest. Entries that the test does not use are zero.

    Args:
        sent: per batch its updates, each with all tensors that left the client.
        state: the model that the updates were computed on.
        images: victims, then strangers, n × C × H × W.
        slots: which images are the victims of which batch.
        progress: called after every batch.
    """
    table = torch.zeros(len(sent), len(images), dtype=torch.float64)
    sights = [Sight()] * len(slots.batch)
    templates = _templates(images)
    for b in Loop(len(sent)):
        updates = sent[b]
        rows = torch.from_numpy(slots.used[b]).nonzero().flatten()
        for update, (shape, flat) in product(updates, templates.items()):
            for reading in _readings(update, state, images[0].numel()):
                largest, places = _windows(reading.signal, flat[rows])
                likeness = _beyond(largest)
                for i in (likeness > table[b, rows]).nonzero().flatten().tolist():
                    image = int(rows[i])
                    table[b, image] = likeness[i]
                    if image < len(sights) and slots.batch[image] == b:
                        name = f"{reading.name} ({shape})" if shape else reading.name
                        tensor = reading.tensor_at(int(places[i]))
                        sights[image] = Sight(tensor=tensor, reading=name, likeness=float(likeness[i]))
        if progress is not None:
            progress(b + 1, len(sent))
    return table, sights


def _beyond(largest: Tensor) -> Tensor:
    """How surely an image is seen: 0 where it is not beyond nearly all images of the batch's classes, victims and
    strangers alike; 0.93 two standard deviations beyond that.

    Correlations are transformed as Fisher did, which makes their spread alike everywhere. The spread is estimated from the
    median absolute deviation, which the images that are seen do not move.
    """
    transformed = largest.clamp(max=1 - 1e-6).atanh()
    away = transformed - transformed.median()
    deviation = (1.4826 * away.abs().median()).clamp(min=LEAST_DEVIATION)
    beyond = (away / deviation - OUTLYING).clamp(min=0)
    return (1 - (-beyond.square() / 2).exp()).sqrt()


# -- what is compared --------------------------------------------------------------------------------------------------


def _templates(images: Tensor) -> dict[str, Tensor]:
    """The images as they may be written down, n × values, by what was changed in them."""
    grey = images.double().mean(dim=1, keepdim=True)
    shapes = {"": images.double()}
    if images.shape[1] > 1:
        shapes |= {"channels last": images.double().movedim(1, -1), "grey": grey}
    if min(images.shape[2:]) >= 8:
        shapes["half size"] = avg_pool2d(grey, 2)
    flat = {name: x.flatten(1) - x.flatten(1).mean(dim=1, keepdim=True) for name, x in shapes.items()}
    return {name: x / x.norm(dim=1, keepdim=True).clamp(min=1e-9) for name, x in flat.items()}


def _readings(sent: Tensors, state: Mapping[str, Tensor], size: int) -> Iterator[Reading]:
    """All readings of an update; `size` is the number of values of an image."""
    stored = {n: _real(t.detach().cpu()) for n, t in sent.items() if t.numel()}
    if not stored:
        return
    numbers = {n: widened(t) for n, t in stored.items()}
    flat = {n: t.flatten() for n, t in numbers.items()}
    same = {n: flat[n] for n, t in numbers.items() if n in state and state[n].shape == t.shape}
    most = max(ENOUGH_VALUES, min(MOST_VALUES, 2 * size * len(flat)))
    reading = partial(_reading, parameters=same.keys(), most=most)
    yield reading("values", flat)
    yield reading("columns", {n: t.flatten(1).T.flatten() for n, t in numbers.items() if t.ndim > 1})
    yield reading("sizes", {n: t.abs() for n, t in flat.items()})
    yield reading("signs", {n: t.sign() for n, t in flat.items()})
    yield reading("ratios to the model", {n: t.double() / _real(state[n].cpu()).flatten() for n, t in same.items()})
    for bits in BITS:
        yield reading(f"{bits} lowest bits", {n: _low_bits(t.flatten(), bits) for n, t in stored.items()})
    equal = [(a, b) for a, b in combinations(flat, 2) if flat[a].shape == flat[b].shape]
    for a, b in [pair for pair in equal if not same.keys() >= set(pair)][:MOST_PAIRS]:
        one, other = flat[a].double(), flat[b].double()
        yield reading("differences", {f"{a} - {b}": one - other})
        yield reading("ratios", {f"{a} / {b}": one / other})


def _reading(name: str, values: dict[str, Tensor], parameters: Collection[str], most: int) -> Reading:
    """Of at most so many values: first of tensors that are no parameters, and of small ones, which leave more to the others."""
    kept = dict[str, Tensor]()
    for group in ([n for n in values if n not in parameters], [n for n in values if n in parameters]):
        for place, tensor in enumerate(sorted(group, key=lambda n: len(values[n]))):
            kept[tensor] = values[tensor][: most // (len(group) - place)]
            most -= len(kept[tensor])
    return Reading(name, tuple(values), tuple(kept[tensor] for tensor in values))


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).movedim(-1, 0)  # first all real parts
    return tensor


def _low_bits(values: Tensor, bits: int) -> Tensor:
    whole = values.contiguous().view(INTEGERS[values.element_size()]) if values.is_floating_point() else values
    return torch.bitwise_and(whole.long(), 2**bits - 1)


# -- correlation at every offset ---------------------------------------------------------------------------------------


def _windows(signal: Tensor, templates: Tensor) -> tuple[Tensor, Tensor]:
    """Per template its largest |correlation| with any window of the signal, and where that begins.

    Templates have mean 0 and length 1. The products come from Fourier transforms of blocks that overlap by a window.
    """
    count, size = templates.shape
    largest, places = torch.zeros(count), torch.zeros(count, dtype=torch.long)
    if len(signal) < size:
        return largest.double(), places
    length = 2 ** max(12, (4 * size - 1).bit_length())
    step = length - size + 1
    offsets = len(signal) - size + 1
    padded = torch.cat([signal, signal.new_zeros(-(-offsets // step) * step + size - 1 - len(signal))])
    blocks = padded.unfold(0, length, step) if len(padded) >= length else padded[None]
    blocks = blocks - blocks.mean(dim=1, keepdim=True)
    blocks = blocks / blocks.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    spectrum = torch.fft.rfft(templates.float(), length).conj()
    spread = _spread(blocks, size)
    small = _small_part(signal, spread.flatten()[:offsets].isinf(), size)
    spread.flatten()[offsets:] = torch.inf  # windows that reach beyond the signal
    for first in range(0, len(blocks), chunk := max(1, BLOCK // (count * length))):
        part = torch.fft.rfft(blocks[first : first + chunk].float(), length)
        products = torch.fft.irfft(part[:, None] * spectrum, length)[:, :, : spread.shape[1]]
        best, place = products.abs_().div_(spread[first : first + chunk, None]).max(dim=2)
        best, block = best.max(dim=0)
        places = torch.where(best > largest, (first + block) * step + place.gather(0, block[None])[0], places)
        largest = torch.maximum(largest, best)
    if small is not None:
        again, there = _windows(small, templates)
        places = torch.where(again > largest, there, places)
        largest = torch.maximum(largest, again.float())
    return largest.double().clamp(max=1.0), places


def _small_part(signal: Tensor, flat: Tensor, size: int) -> Tensor | None:
    """What lies in windows that are flat beside large values, and 0 elsewhere; None where that is nothing.

    Without it one large number would hide an image that stands near it.
    """
    ends = torch.nn.functional.pad(flat.double(), (size, size - 1)).cumsum(0)
    small = torch.where(ends[size:] > ends[:-size], signal, 0.0)
    sizes = [(s - s.median()).abs().max() for s in (small, signal)]
    return small if 0 < sizes[0] < SMALL * sizes[1] else None


def _spread(blocks: Tensor, size: int) -> Tensor:
    """Blocks × offsets: the length of each window about its mean; infinite where it is constant."""

    def sums(values: Tensor) -> Tensor:
        total = torch.cat([values.new_zeros(len(values), 1), values.cumsum(dim=1)], dim=1)
        return total[:, size:] - total[:, :-size]

    energy = sums(blocks.square()) - sums(blocks).square() / size
    flat = energy <= FLAT * blocks.square().sum(dim=1, keepdim=True)
    return energy.masked_fill(flat, torch.inf).sqrt().float()
