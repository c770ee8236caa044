"""The fifty functions of ATS undone, as far as they can be: the images before, and which of their pixels are known.

Movements go back the same way, light is blended back, levels are mapped back. Clipped values stay at their end of the
range; pixels that left the picture are unknown.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.defenses.data.ats.defense import Draw
from gradveil.defenses.data.ats.transforms import FUNCTIONS, apply

SETTLED = 20  # rounds of those that are undone by repetition
_MOVEMENTS = ("translateX", "translateY", "shearY", "rotate")


def undo(
    images: Tensor, policies: tuple[tuple[int, ...], ...], draw: Draw, crop: int, public: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Images in [0, 1] before crop, flip and policy as `draw` (one row per image) says, and a mask of visible pixels."""
    x, visible = images.clone(), torch.ones_like(images, dtype=torch.bool)
    for which, policy in enumerate(policies):
        rows = draw.policy == which
        for place in reversed(range(len(policy))):
            x[rows], visible[rows] = _undone(x[rows], visible[rows], policy[place], draw.signs[rows, place], public)
    x, visible = (torch.where(draw.flip.view(-1, 1, 1, 1), t.flip(3), t) for t in (x, visible))
    return _shift(x, crop - draw.crop), _shift(visible, crop - draw.crop)


def _undone(x: Tensor, visible: Tensor, index: int, sign: Tensor, public: Tensor | None) -> tuple[Tensor, Tensor]:
    operation, magnitude = FUNCTIONS[index]
    if not len(x):
        return x, visible
    if operation == "rotate":
        return _rotated_back(x, visible, magnitude)
    if operation in _MOVEMENTS:
        back = -sign[:, None]
        return apply(x, [index], back), apply(visible.float(), [index], back) > 0.9
    if operation in ("equalize", "autocontrast"):
        return (_respread(x, public) if operation == "equalize" and public is not None else x), visible
    return _LEVELS[operation](x, magnitude, sign.view(-1, 1, 1, 1), index), visible


def _shift(x: Tensor, by: Tensor) -> Tensor:
    """Rows of images moved down and right by `by` (n × 2), so that pixel (i, j) comes from (i + by, j + by)."""
    height, width = x.shape[2:]
    rows, columns = by[:, :1] + torch.arange(height), by[:, 1:] + torch.arange(width)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    each = torch.arange(len(x))[:, None, None]
    picked = x[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return picked * inside[:, None]


def _rotated_back(x: Tensor, visible: Tensor, degrees: float) -> tuple[Tensor, Tensor]:
    angle = torch.deg2rad(torch.tensor(-degrees))
    matrix = torch.tensor([[angle.cos(), -angle.sin(), 0], [angle.sin(), angle.cos(), 0]])
    height, width = x.shape[2:]
    matrix[0, 1] *= height / width
    matrix[1, 0] *= width / height
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False), F.grid_sample(visible.float(), grid, align_corners=False) > 0.9


def _respread(x: Tensor, public: Tensor) -> Tensor:
    """An equalised level is the share of darker pixels; public images tell what level has that share."""
    levels = public.flatten().sort().values
    return levels[(x * (len(levels) - 1)).round().long()]


# -- levels, one image function each: (images, magnitude, sign, index) ------------------------------------------------


def _contrast(x: Tensor, magnitude: float, sign: Tensor, index: int) -> Tensor:
    mean, before = _luma(x).mean((1, 2, 3), keepdim=True), x
    for _ in range(SETTLED):
        before = _blend_back(x, mean, 1 + magnitude * sign)
        mean = _luma(before).mean((1, 2, 3), keepdim=True)
    return before


def _sharpness(x: Tensor, magnitude: float, sign: Tensor, index: int) -> Tensor:
    before, signs = x, sign.view(-1, 1)
    for _ in range(SETTLED):
        before = (before + 0.7 * (x - apply(before, [index], signs))).clamp(0, 1)
    return before


def _luma(x: Tensor) -> Tensor:
    return x if x.shape[1] == 1 else (x * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)


def _blend_back(x: Tensor, dull: Tensor, factor: Tensor) -> Tensor:
    """x = dull + factor · (before − dull), cut to the range: what lies at its ends was there or beyond."""
    before = dull + (x - dull) / factor
    before = torch.where((factor > 1) & (x < 1 / 255), torch.zeros_like(x), before)
    return torch.where((factor > 1) & (x > 254.5 / 255), torch.ones_like(x), before).clamp(0, 1)


_LEVELS: dict[str, Callable[[Tensor, float, Tensor, int], Tensor]] = {
    "invert": lambda x, *_: 1 - x,
    "posterize": lambda x, bits, *_: torch.where(x > 0, x + 2 ** (8 - int(bits)) / 510, x).clamp(0, 1),
    # Two levels lead to one, and the lower is taken: which pixels were brighter is lost.
    "solarize": lambda x, threshold, *_: torch.where(x < threshold / 255, x, 1 - x),
    "brightness": lambda x, change, sign, _: _blend_back(x, torch.zeros_like(x), 1 + change * sign),
    "color": lambda x, change, sign, _: x if x.shape[1] == 1 else _blend_back(x, _luma(x), 1 + change * sign),
    "contrast": _contrast,
    "sharpness": _sharpness,
}


def signed(policy: Sequence[int]) -> list[bool]:
    """Which functions of a policy have two directions."""
    alike = ("invert", "rotate", "solarize", "posterize", "autocontrast", "equalize")
    return [FUNCTIONS[i].operation not in alike for i in policy]
