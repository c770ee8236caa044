"""Rebuilt images as a notebook shows them: a strip of pictures with its numbers below, in one piece of HTML."""

import base64
import io
from html import escape

import torch
from PIL import Image
from torch import Tensor

from gradveil.core.text import plain

MOST = 64  # pictures in a strip
SIDE = 112  # pixels that a small image is enlarged to


def strip(images: Tensor) -> Image.Image:
    """The images side by side, enlarged to be seen. What is not finite is mid-grey."""
    shown = torch.nan_to_num(images.detach().cpu().float()[:MOST], nan=0.5).clamp(0, 1)
    row = torch.cat(list((shown * 255).round().byte()), dim=2).permute(1, 2, 0).numpy()
    picture = Image.fromarray(row[..., 0] if row.shape[2] < 3 else row[..., :3])
    scale = max(1, SIDE // images.shape[2])
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)


def figure(images: Tensor, caption: str) -> str:
    """A strip of images with words below."""
    file = io.BytesIO()
    strip(images).save(file, format="PNG")
    code = base64.b64encode(file.getvalue()).decode()
    below = escape(plain(caption))
    return (
        f'<figure style="margin:0 0 .8em"><img src="data:image/png;base64,{code}" alt="{below}" '
        f'style="image-rendering:pixelated;max-width:100%"><figcaption>{below}</figcaption></figure>'
    )
