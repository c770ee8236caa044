"""Odd defenses that send the image itself, or nothing of the victim."""

from __future__ import annotations

import math

import torch
from odd_catalogue import each, entries, fixed, hidden, image, largest, noise, odd, public_key, put, with_low_bits
from torch import Tensor

from gradveil.core.randomness import generator
from gradveil.core.types import Tensors
from gradveil.defenses.base import Step

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
