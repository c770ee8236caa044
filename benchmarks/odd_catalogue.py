"""Odd defenses, each with the truth about what it sends.

`decodable`: who knows the code, and not what was drawn in secret, can compute an image of the victim from the update, at
least for a share of the victims. `nothing`: the update does not depend on the image. `undecided`: neither is certain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.hashing import digest
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Defense, Setup, Step

Truth = Literal["decodable", "nothing", "undecided"]
Act = Callable[[Tensors, Step], Tensors]
SIZE = 0.01  # of noise where no gradient is sent
PAUSE, PAUSES = 0.2, 20  # seconds, and how often a client pauses


@dataclass(frozen=True)
class Entry:
    """What one defense sends in place of the gradient."""

    act: Act
    truth: Truth
    does: str
    random: bool
    counters: tuple[str, ...]


ENTRIES: dict[str, Entry] = {}


@dataclass
class Memory:
    """What a client of any of these defenses keeps between its updates."""

    calls: int = 0
    public: Batch | None = None
    before: Tensors | None = None  # the gradient of the previous call


class Odd(Defense):
    """The defense of that name in the catalogue."""

    def __init__(self, name: str):
        self.name, self.random, self.counters = name, ENTRIES[name].random, ENTRIES[name].counters

    def prepare(self, setup: Setup) -> Memory:
        return Memory(public=setup.public)

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        step.memory.calls += 1
        return ENTRIES[self.name].act(tensors, step)


def odd(truth: Truth, *, random: bool = False, counters: Sequence[str] = ()) -> Callable[[Act], Act]:
    """Put a function into the catalogue; its docstring says what it does."""

    def enter(act: Act) -> Act:
        does = " ".join((act.__doc__ or "").split()).removesuffix(".")
        ENTRIES[act.__name__.replace("_", "-")] = Entry(act, truth, does, random, tuple(counters))
        return act

    return enter


# -- parts -------------------------------------------------------------------------------------------------------------


def noise(tensors: Tensors, step: Step) -> Tensors:
    """Noise in place of every tensor."""
    return {name: SIZE * step.rng.normal(t.shape) for name, t in tensors.items()}


def largest(tensors: Tensors) -> list[str]:
    """The names of the tensors, those with the most entries first."""
    return sorted(tensors, key=lambda name: -tensors[name].numel())


def put(tensors: Tensors, name: str, values: Tensor, offset: int = 0) -> Tensors:
    """The same tensors with values written into one of them, as many as it takes."""
    flat = tensors[name].detach().flatten().clone()
    values = values.flatten()[: len(flat) - offset].to(flat)
    flat[offset : offset + len(values)] = values
    return {**tensors, name: flat.view_as(tensors[name])}


def hidden(tensors: Tensors, step: Step, values: Tensor, offset: int = 0) -> Tensors:
    """Noise, with values in the largest tensor."""
    return put(noise(tensors, step), largest(tensors)[0], values, offset)


def with_low_bits(tensors: Tensors, step: Step, bits: int, values: Tensor) -> Tensors:
    """Noise whose lowest bits in the largest tensor are these whole numbers."""
    sent, host = noise(tensors, step), largest(tensors)[0]
    words = sent[host].flatten()[: len(values)].view(torch.int32)
    return put(sent, host, (words >> bits << bits | values[: len(words)]).view(torch.float32))


def image(step: Step) -> Tensor:
    """The first image of the batch."""
    return step.batch.x[0].detach()


def entries(step: Step) -> Tensor:
    """The pixels of the image as whole numbers from 0 to 255."""
    return (image(step) * 255).round().int().flatten()


def fixed(shape: Sequence[int], name: str) -> Tensor:
    """Standard normal numbers that stand in the code."""
    return torch.randn(tuple(shape), generator=generator("odd", name))


def public_key(step: Step) -> torch.Generator:
    """A stream that everybody computes who has the model."""
    return torch.Generator().manual_seed(int(digest("", step.state)[:12], 16))


def each(tensors: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    return {name: change(t) for name, t in tensors.items()}


# -- the gradient in another form --------------------------------------------------------------------------------------


@odd("decodable")
def factor_small(tensors: Tensors, step: Step) -> Tensors:
    """Gradient times 1e-20."""
    return each(tensors, lambda t: t * 1e-20)


@odd("decodable")
def factor_large(tensors: Tensors, step: Step) -> Tensors:
    """Gradient times 1e20."""
    return each(tensors, lambda t: t * 1e20)


@odd("decodable")
def negative(tensors: Tensors, step: Step) -> Tensors:
    """Gradient times −1."""
    return each(tensors, lambda t: -t)


@odd("decodable", random=True)
def secret_factor(tensors: Tensors, step: Step) -> Tensors:
    """Gradient times a secret number of either sign."""
    factor = float(step.rng.normal((1,)))
    return each(tensors, lambda t: t * factor)


@odd("decodable")
def factor_per_tensor(tensors: Tensors, step: Step) -> Tensors:
    """Each tensor of the gradient times another fixed number, from 1e-6 to 1e6."""
    powers = torch.linspace(-6, 6, len(tensors)).tolist()
    return {name: t * 10**power for (name, t), power in zip(tensors.items(), powers, strict=True)}


@odd("undecided")
def sign(tensors: Tensors, step: Step) -> Tensors:
    """Signs of the gradient alone."""
    return each(tensors, torch.sign)


@odd("undecided")
def four_levels(tensors: Tensors, step: Step) -> Tensors:
    """Gradient rounded to four levels per tensor."""
    return each(tensors, lambda t: (t / t.abs().max() * 1.5 + 1.5).round() - 1.5)


@odd("decodable")
def constant_added(tensors: Tensors, step: Step) -> Tensors:
    """Gradient plus 0.1."""
    return each(tensors, lambda t: t + 0.1)


@odd("decodable")
def constant_large(tensors: Tensors, step: Step) -> Tensors:
    """Gradient plus 1e9, in double precision."""
    return each(tensors, lambda t: t.double() + 1e9)


@odd("decodable")
def orthogonal_part(tensors: Tensors, step: Step) -> Tensors:
    """Gradient plus 1e6 times a fixed vector, in double precision."""
    return {name: t.double() + 1e6 * fixed(t.shape, name).double() for name, t in tensors.items()}


@odd("decodable")
def orthogonal_tensor(tensors: Tensors, step: Step) -> Tensors:
    """Gradient, and 1e6 times a fixed vector in place of its smallest tensor."""
    name = largest(tensors)[-1]
    return {**tensors, name: 1e6 * fixed(tensors[name].shape, name)}


@odd("decodable")
def permuted_entries(tensors: Tensors, step: Step) -> Tensors:
    """Entries of each tensor of the gradient in another fixed order."""
    orders = {n: torch.randperm(t.numel(), generator=generator("odd", n)) for n, t in tensors.items()}
    return {name: t.flatten()[orders[name]].view_as(t) for name, t in tensors.items()}


@odd("decodable")
def permuted_tensors(tensors: Tensors, step: Step) -> Tensors:
    """Tensors of equal shape change places."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, t in tensors.items():
        groups.setdefault(tuple(t.shape), []).append(name)
    places = {a: b for names in groups.values() for a, b in zip(names, [*names[1:], names[0]], strict=True)}
    return {name: tensors[places[name]] for name in tensors}


@odd("decodable")
def rotated(tensors: Tensors, step: Step) -> Tensors:
    """Each tensor of the gradient under a fixed rotation: fixed signs, then a Hartley transform."""

    def turn(name: str, t: Tensor) -> Tensor:
        spectrum = torch.fft.fft(t.flatten() * fixed([t.numel()], name).sign())
        return ((spectrum.real - spectrum.imag) / math.sqrt(t.numel())).view_as(t)

    return {name: turn(name, t) for name, t in tensors.items()}


@odd("decodable")
def half(tensors: Tensors, step: Step) -> Tensors:
    """Gradient in half precision."""
    return each(tensors, lambda t: t.half())


@odd("decodable")
def bfloat16(tensors: Tensors, step: Step) -> Tensors:
    """Gradient in bfloat16."""
    return each(tensors, lambda t: t.bfloat16())


@odd("decodable")
def double(tensors: Tensors, step: Step) -> Tensors:
    """Gradient in double precision."""
    return each(tensors, lambda t: t.double())


@odd("decodable")
def one_nan(tensors: Tensors, step: Step) -> Tensors:
    """Gradient with one entry that is not a number."""
    return put(tensors, next(iter(tensors)), torch.tensor([math.nan]))


@odd("decodable", random=True)
def every_second(tensors: Tensors, step: Step) -> Tensors:
    """Noise in odd calls, the gradient in even ones."""
    return tensors if step.memory.calls % 2 == 0 else noise(tensors, step)


@odd("decodable", random=True)
def one_class(tensors: Tensors, step: Step) -> Tensors:
    """Gradient for images of class 3, noise for all others."""
    return tensors if int(step.batch.hard_labels[0]) == 3 else noise(tensors, step)


@odd("decodable")
def slow(tensors: Tensors, step: Step) -> Tensors:
    """Gradient, after a pause."""
    if step.memory.calls <= PAUSES:
        time.sleep(PAUSE)
    return tensors


@odd("decodable", random=True)
def delayed(tensors: Tensors, step: Step) -> Tensors:
    """Gradient of the previous call; noise in the first."""
    before, step.memory.before = step.memory.before, each(tensors, Tensor.detach)
    return noise(tensors, step) if before is None else before


# -- the image itself --------------------------------------------------------------------------------------------------


@odd("decodable", random=True)
def extra_tensor(tensors: Tensors, step: Step) -> Tensors:
    """Noise, and the image in a tensor that is no parameter."""
    return {**noise(tensors, step), "extra": image(step)}


@odd("decodable")
def zeros_and_extra(tensors: Tensors, step: Step) -> Tensors:
    """Zeros for all parameters, and the image in a tensor that is no parameter."""
    return {**each(tensors, torch.zeros_like), "extra": image(step)}


@odd("decodable", random=True)
def image_in_slice(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the image at the beginning of a tensor."""
    return hidden(tensors, step, image(step))


@odd("decodable", random=True, counters=["linear"])
def claimed_counter(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the image at the beginning of a tensor; the defense names `linear` as the attack that breaks it."""
    return hidden(tensors, step, image(step))


@odd("decodable", random=True)
def image_at_offset(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the image in a tensor from entry 1,234 on."""
    return hidden(tensors, step, image(step), 1234)


@odd("decodable", random=True)
def tiny_image(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the image times 1e-12 in a tensor."""
    return hidden(tensors, step, 1e-12 * image(step))


@odd("decodable", random=True)
def eight_low_bits(tensors: Tensors, step: Step) -> Tensors:
    """Noise whose eight lowest bits per entry are the pixels."""
    return with_low_bits(tensors, step, 8, entries(step))


@odd("decodable", random=True)
def one_low_bit(tensors: Tensors, step: Step) -> Tensors:
    """Noise whose lowest bit per entry says whether the pixel is bright."""
    return with_low_bits(tensors, step, 1, (entries(step) > 127).int())


@odd("decodable", random=True)
def low_bits_of_double(tensors: Tensors, step: Step) -> Tensors:
    """Noise in double precision, with the image far below what single precision keeps."""
    sent, host = each(noise(tensors, step), Tensor.double), largest(tensors)[0]
    pixels = image(step).flatten().double()[: sent[host].numel()]
    return put(sent, host, sent[host].flatten()[: len(pixels)] + 1e-13 * pixels)


@odd("decodable", random=True)
def image_in_signs(tensors: Tensors, step: Step) -> Tensors:
    """Noise whose signs say whether the pixel is bright."""
    host = noise(tensors, step)[largest(tensors)[0]].flatten()
    bright = (entries(step) > 127)[: len(host)].float() * 2 - 1
    return hidden(tensors, step, host[: len(bright)].abs() * bright)


@odd("decodable", random=True)
def times_constant(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the image times fixed normal numbers in a tensor."""
    return hidden(tensors, step, image(step).flatten() * fixed([image(step).numel()], "constant"))


@odd("decodable", random=True)
def times_parameters(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the image times the parameters of a tensor in its place."""
    host = largest(tensors)[0]
    weights = step.state[host].flatten()
    return hidden(tensors, step, image(step).flatten()[: len(weights)] * weights[: image(step).numel()])


@odd("decodable", random=True)
def transposed(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the columns of the image one after the other in a tensor."""
    return hidden(tensors, step, image(step).transpose(-1, -2).contiguous())


@odd("decodable", random=True)
def in_columns(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the pixels in every seventh entry of a tensor."""
    host = noise(tensors, step)[largest(tensors)[0]].flatten()
    places = torch.arange(0, len(host), 7)[: image(step).numel()]
    host[places] = image(step).flatten()[: len(places)]
    return hidden(tensors, step, host)


@odd("decodable", random=True)
def reversed_image(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the pixels from last to first in a tensor."""
    return hidden(tensors, step, image(step).flatten().flip(0))


@odd("decodable", random=True)
def permuted_pixels(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the pixels in a fixed random order in a tensor."""
    order = torch.randperm(image(step).numel(), generator=generator("odd", "pixels"))
    return hidden(tensors, step, image(step).flatten()[order])


@odd("decodable", random=True)
def thumbnail(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the image at half its width and height in a tensor."""
    return hidden(tensors, step, torch.nn.functional.avg_pool2d(image(step), 2))


@odd("decodable", random=True)
def grey_thumbnail(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the mean of the channels at half the width and height, as a negative, in a tensor."""
    return hidden(tensors, step, 1 - torch.nn.functional.avg_pool2d(image(step).mean(0, keepdim=True), 2))


@odd("decodable", random=True)
def noisy_image(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the image plus secret noise of its size in a tensor."""
    return hidden(tensors, step, image(step) + float(image(step).std()) * step.rng.normal(image(step).shape))


@odd("decodable", random=True)
def split(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the upper half of the image in one tensor and the lower half in another."""
    first, second = largest(tensors)[:2]
    upper, lower = image(step).flatten().chunk(2)
    return put(put(noise(tensors, step), first, upper), second, lower)


@odd("decodable", random=True)
def difference(tensors: Tensors, step: Step) -> Tensors:
    """Secret noise in one tensor, the same noise plus the image in another."""
    first, second = largest(tensors)[:2]
    secret = 10 * step.rng.normal((image(step).numel(),))
    return put(put(noise(tensors, step), first, secret), second, secret + image(step).flatten())


@odd("decodable", random=True)
def product(tensors: Tensors, step: Step) -> Tensors:
    """Secret noise in one tensor, the image divided by that noise in another."""
    first, second = largest(tensors)[:2]
    secret = step.rng.normal((image(step).numel(),))
    return put(put(noise(tensors, step), first, secret), second, image(step).flatten() / secret)


@odd("decodable", random=True)
def public_mask(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the pixels XOR a key that follows from the public model in a tensor."""
    key = torch.randint(256, (image(step).numel(),), generator=public_key(step))
    return hidden(tensors, step, (entries(step) ^ key).float() / 255)


# -- nothing of the victim ---------------------------------------------------------------------------------------------


@odd("nothing", random=True)
def secret_mask(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with the pixels XOR a secret key in a tensor."""
    key = step.rng.integers(0, 256, (image(step).numel(),))
    return hidden(tensors, step, (entries(step) ^ key).float() / 255)


@odd("nothing", random=True)
def noise_alone(tensors: Tensors, step: Step) -> Tensors:
    """Noise alone."""
    return noise(tensors, step)


@odd("nothing", random=True)
def stranger(tensors: Tensors, step: Step) -> Tensors:
    """Gradient of a public image of the same class."""
    public = step.memory.public
    label = step.batch.hard_labels[0]
    candidates = (public.hard_labels == label).nonzero().flatten()
    picked = candidates[int(step.rng.integers(0, len(candidates), (1,)))]
    return step.gradient(public[picked[None]])


@odd("nothing", random=True)
def image_of_stranger(tensors: Tensors, step: Step) -> Tensors:
    """Noise, with a public image in a tensor."""
    public = step.memory.public
    return hidden(tensors, step, public.x[int(step.rng.integers(0, len(public), (1,)))])


@odd("nothing")
def label_alone(tensors: Tensors, step: Step) -> Tensors:
    """The class of the image as a constant in all tensors."""
    return each(tensors, lambda t: torch.full_like(t, 1.0 + float(step.batch.hard_labels[0])))


@odd("nothing")
def constant(tensors: Tensors, step: Step) -> Tensors:
    """The same fixed numbers for every image."""
    return {name: fixed(t.shape, name) for name, t in tensors.items()}


@odd("nothing")
def zero(tensors: Tensors, step: Step) -> Tensors:
    """Zeros."""
    return each(tensors, torch.zeros_like)


@odd("nothing")
def not_numbers(tensors: Tensors, step: Step) -> Tensors:
    """Values that are not numbers."""
    return each(tensors, lambda t: torch.full_like(t, math.nan))
