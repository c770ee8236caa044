"""Odd defenses that send the gradient in another form."""

from __future__ import annotations

import math
import time

import torch
from odd_catalogue import each, fixed, largest, noise, odd, put
from torch import Tensor

from gradveil.core.randomness import generator
from gradveil.core.types import Tensors
from gradveil.defenses.base import Step

PAUSE, PAUSES = 0.2, 20  # seconds, and how often a client pauses


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
