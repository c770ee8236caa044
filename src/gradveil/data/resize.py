"""One way to make images square and of one size, whatever their source."""

import numpy as np
import torch
from torch.nn.functional import interpolate

from gradveil.data.raw import Array

CHUNK = 1024  # images converted to floats at a time, so that a large set does not need four times its memory


def resize_square(x: Array, size: int) -> Array:
    """Crop n × H × W × C to the central square and resize to `size`: box average at whole factors, else bilinear."""
    side = min(x.shape[1:3])
    top, left = (x.shape[1] - side) // 2, (x.shape[2] - side) // 2
    x = x[:, top : top + side, left : left + side]
    if side == size:
        return x
    out = np.empty((len(x), size, size, x.shape[3]), dtype=x.dtype)
    for i in range(0, len(x), CHUNK):
        pixels = torch.from_numpy(np.array(x[i : i + CHUNK].transpose(0, 3, 1, 2), order="C")).float()
        if side % size == 0:
            pixels = interpolate(pixels, size=(size, size), mode="area")
        else:
            pixels = interpolate(pixels, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
        if x.dtype == np.uint8:
            pixels = pixels.round()
        pixels = pixels.clamp(0, 255 if x.dtype == np.uint8 else 1)
        out[i : i + CHUNK] = pixels.permute(0, 2, 3, 1).numpy().astype(x.dtype)
    return out
