"""The fifty image functions of which ATS policies consist, for a whole batch at once.

They are operations of AutoAugment as the library of the ATS authors lists them: an index, an operation, and a level from
0 to 9 in the range of the operation. The definitions are those of Pillow, on 8-bit levels, including its rounding; a grey
image gives the same as its RGB copy. The library has probabilities, which it never uses: every function is applied.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.core.errors import UserError

LIBRARY = (
    "invert contrast:6 rotate:2 translateX:9 sharpness:1 sharpness:3 shearY:2 translateY:2 autocontrast equalize "
    "shearY:5 posterize:5 color:3 brightness:5 sharpness:9 brightness:9 equalize equalize contrast:7 sharpness:5 "
    "color:5 translateX:5 equalize autocontrast translateY:3 sharpness:6 brightness:6 color:8 solarize:0 invert "
    "equalize autocontrast equalize equalize color:5 equalize autocontrast solarize:4 brightness:3 color:0 "
    "solarize:1 autocontrast translateY:3 translateY:3 autocontrast solarize:1 equalize invert translateY:3 "
    "autocontrast"
)
RANGES = {  # the values of levels 0 and 9; AutoAugment has 0.9 where ATS has 0.5
    "shearY": (0.0, 0.3),
    "translateX": (0.0, 150 / 331),
    "translateY": (0.0, 150 / 331),
    "rotate": (0.0, 30.0),
    "posterize": (8.0, 4.0),
    "solarize": (256.0, 0.0),
    **dict.fromkeys(("color", "contrast", "sharpness", "brightness"), (0.0, 0.5)),
}
GREY_FILL = 128.0  # fills the border after a rotation; other movements fill with black


class Function(NamedTuple):
    """One entry of the library."""

    operation: str
    magnitude: float = 0.0


def _entry(text: str) -> Function:
    operation, _, level = text.partition(":")
    if operation not in RANGES:
        return Function(operation)
    low, high = RANGES[operation]
    magnitude = low + (high - low) * int(level) / 9
    return Function(operation, float(round(magnitude)) if operation == "posterize" else magnitude)


FUNCTIONS: tuple[Function, ...] = tuple(_entry(text) for text in LIBRARY.split())


def apply(images: Tensor, policy: Sequence[int], signs: Tensor) -> Tensor:
    """Apply a policy to images n × C × H × W in [0, 1]. `signs` (n × functions, ±1) are the directions of the functions."""
    if images.shape[1] not in (1, 3):
        raise UserError(f"the functions of ATS need grey or RGB images, not {images.shape[1]} channels.")
    levels = (images * 255).round().clamp(0, 255)
    for place, index in enumerate(policy):
        operation, magnitude = FUNCTIONS[index]
        levels = _OPERATIONS[operation](levels, magnitude, signs[:, place].to(levels))
    return levels / 255


def _blend(dull: Tensor, levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    """The enhancers of Pillow: away from a dull version of the image (factor 1 + m) or towards it (1 − m)."""
    factor = (1 + magnitude * sign.double()).float().view(-1, 1, 1, 1)
    return (dull + factor * (levels - dull)).clamp(0, 255).floor()


def _luma(levels: Tensor) -> Tensor:
    """ITU-R 601 in 16-bit fixed point, as Pillow turns RGB to grey."""
    if levels.shape[1] == 1:
        return levels
    weights = torch.tensor([19595, 38470, 7471]).view(3, 1, 1)
    return (((levels.long() * weights).sum(1, keepdim=True) + 0x8000) >> 16).to(levels)


def _brightness(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    return _blend(torch.zeros_like(levels), levels, magnitude, sign)


def _color(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    return _blend(_luma(levels), levels, magnitude, sign)


def _contrast(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    mean = (_luma(levels).double().mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean.to(levels), levels, magnitude, sign)


def _sharpness(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    channels = levels.shape[1]
    kernel = torch.ones(channels, 1, 3, 3)
    kernel[:, :, 1, 1] = 5
    smooth = levels.clone()  # the outermost pixels stay unchanged
    smooth[:, :, 1:-1, 1:-1] = (F.conv2d(levels, kernel, groups=channels) / 13 + 0.5).floor()
    return _blend(smooth, levels, magnitude, sign)


def _invert(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    return 255 - levels


def _solarize(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    return torch.where(levels < magnitude, levels, 255 - levels)


def _posterize(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    step = 2.0 ** (8 - int(magnitude))
    return (levels / step).floor() * step


def _autocontrast(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    wide = levels.double()
    low, high = wide.amin((2, 3), keepdim=True), wide.amax((2, 3), keepdim=True)
    scale = torch.full_like(low, 255) / (high - low).clamp_min(1)  # `255 / x` would round twice
    stretched = (wide * scale - low * scale).clamp(0, 255).floor().to(levels)
    return torch.where(high > low, stretched, levels)


def _equalize(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    flat = levels.long().flatten(2)  # n × channels × pixels
    histogram = torch.zeros(*flat.shape[:2], 256, dtype=torch.long).scatter_add_(2, flat, torch.ones_like(flat))
    brightest = histogram.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - brightest) // 255
    below = histogram.cumsum(2) - histogram
    table = ((step // 2 + below) // step.clamp_min(1)).clamp(max=255)
    return torch.where(step > 0, table.gather(2, flat), flat).view_as(levels).to(levels)


def _either_way(levels: Tensor, sign: Tensor, move: Callable[[Tensor, float], Tensor]) -> Tensor:
    """`move(images, ±1)` on the images of either sign."""
    moved = torch.empty_like(levels)
    for direction in (1.0, -1.0):
        rows = sign == direction
        moved[rows] = move(levels[rows], direction)
    return moved


def _pick(levels: Tensor, rows: Tensor, columns: Tensor, fill: float) -> Tensor:
    """The nearest source pixel for every target pixel, `fill` where the source lies outside."""
    height, width = levels.shape[2:]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    source = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    picked = levels.flatten(2)[:, :, source.flatten()].view_as(levels)
    return torch.where(inside, picked, torch.full_like(picked, fill))


def _grid(levels: Tensor) -> tuple[Tensor, Tensor]:
    height, width = levels.shape[2:]
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return rows, columns


def _translate(levels: Tensor, magnitude: float, sign: Tensor, *, axis: int) -> Tensor:
    rows, columns = _grid(levels)

    def move(x: Tensor, direction: float) -> Tensor:
        shift = math.floor(direction * magnitude * levels.shape[axis] + 0.5)
        return _pick(x, rows + shift, columns, 0.0) if axis == 2 else _pick(x, rows, columns + shift, 0.0)

    return _either_way(levels, sign, move)


def _rotate(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    """Always anticlockwise, in the 16.16 fixed point of the nearest-pixel transform of Pillow."""
    height, width = levels.shape[2:]
    cos, sin = math.cos(math.radians(magnitude)), math.sin(math.radians(magnitude))
    left = width / 2 - cos * width / 2 + sin * height / 2
    top = height / 2 - sin * width / 2 - cos * height / 2

    def fixed(value: float) -> int:
        return math.floor(value * 65536 + 0.5)

    rows, columns = _grid(levels)
    from_x = fixed(left + (cos - sin) / 2) + fixed(cos) * columns + fixed(-sin) * rows
    from_y = fixed(top + (sin + cos) / 2) + fixed(sin) * columns + fixed(cos) * rows
    return _pick(levels, from_y >> 16, from_x >> 16, GREY_FILL)


def _shear_y(levels: Tensor, magnitude: float, sign: Tensor) -> Tensor:
    """Columns move up or down, bicubic (a = −1) between rows."""
    height = levels.shape[2]
    rows, columns = _grid(levels)

    def shear(x: Tensor, direction: float) -> Tensor:
        y = direction * magnitude * (columns + 0.5).double() + (rows + 0.5)  # the source row of the centre of a pixel
        first = (y - 0.5).floor()
        d = y - 0.5 - first
        taps = [(first.long() + k).clamp(0, height - 1) for k in (-1, 0, 1, 2)]
        a, b, c, e = (x.double().gather(2, tap.expand(x.shape)) for tap in taps)
        value = b + d * (c - a + d * (2 * (a - b) + c - e + d * (b - a + e - c)))
        inside = (y >= 0) & (y < height)
        return (value.clamp(0, 255).floor() * inside).to(x)

    return _either_way(levels, sign, shear)


_OPERATIONS: dict[str, Callable[[Tensor, float, Tensor], Tensor]] = {
    "invert": _invert,
    "contrast": _contrast,
    "rotate": _rotate,
    "translateX": partial(_translate, axis=3),
    "translateY": partial(_translate, axis=2),
    "sharpness": _sharpness,
    "shearY": _shear_y,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "posterize": _posterize,
    "color": _color,
    "brightness": _brightness,
    "solarize": _solarize,
}
