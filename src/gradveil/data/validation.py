"""One validation of images and labels, whichever way they come: files, arrays, a training loop, a Flower client."""

import math

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import UserError, shape_text
from gradveil.core.task import Task
from gradveil.core.types import Batch
from gradveil.data.raw import MAX_CHANNELS, PICTURE_CHANNELS, Array, Images

ROUNDING = 1e-5  # how far a pixel may lie outside [0, 1]: filters that resize overshoot by a few units of the last place


def checked(x: Array, y: Array, where: str) -> Images:
    """Untrusted arrays as `Images`; raises one line that says what is wrong with them."""
    x, y = checked_pixels(x, where), checked_labels(y, where)
    _check_counts(x, y, where)
    return Images(x, y)


def checked_batch(x: Tensor, y: Tensor, task: Task, where: str) -> Batch:
    """Images n × C × H × W and labels as a training loop has them, which must be those of the task."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise UserError(f"{where}: images and labels must be tensors, not {type(x).__name__} and {type(y).__name__}.")
    if not x.is_floating_point():
        raise UserError(f"{where}: images are {x.dtype}; give floats in [0, 1].")
    if x.ndim != 4 or x.shape[1:] != torch.Size(task.input_shape) or not len(x):
        raise UserError(f"{where}: images are {shape_text(x.shape)}; give n×{shape_text(task.input_shape)}.")
    if y.is_complex() or y.dtype == torch.bool or y.ndim not in ((1, 2) if y.is_floating_point() else (1,)):
        raise UserError(f"{where}: labels are {shape_text(y.shape)} {y.dtype}; give one whole class number per image.")
    _check_counts(x, y, where)
    _check_range(x, where)
    _check_targets(y, where) if y.is_floating_point() else _check_classes(y, where, task.num_outputs)
    return Batch(x.detach(), y.detach())


def to_batch(images: Images) -> Batch:
    """Checked images as tensors n × C × H × W in [0, 1]."""
    pixels = torch.from_numpy(np.array(images.pixels.transpose(0, 3, 1, 2), order="C"))  # a copy: nothing is shared
    x = pixels.float().div_(255) if pixels.dtype == torch.uint8 else pixels.float()
    return Batch(x, torch.tensor(images.y))


def checked_pixels(x: Array, where: str) -> Array:
    """Pixels n × H × W × C, as bytes or as 32-bit floats in [0, 1]."""
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise UserError(f"{where}: images are {x.dtype}; give uint8, or floats in [0, 1].")
    if x.ndim not in (3, 4):
        raise UserError(f"{where}: images are {shape_text(x.shape)}; give n×H×W or n×H×W×C.")
    x = x[..., None] if x.ndim == 3 else x
    transposed = x.shape[1] <= PICTURE_CHANNELS < x.shape[3]
    if not 1 <= x.shape[3] <= MAX_CHANNELS or transposed:
        hint = " They look like n×C×H×W: transpose them." if transposed else ""
        raise UserError(f"{where}: images have {x.shape[3]} channels; give n×H×W×C with C up to {MAX_CHANNELS}.{hint}")
    if 0 in x.shape:
        raise UserError(f"{where}: images are {shape_text(x.shape)}, so they are empty.")
    if x.dtype == np.uint8:
        return x
    _check_range(x, where)
    return x.astype(np.float32, copy=False)


def checked_labels(y: Array, where: str) -> Array:
    """Class numbers; or, for losses that take them, one row of numbers per image, as floats."""
    integers = np.issubdtype(y.dtype, np.integer)
    if y.ndim == 2 and y.shape[1] == 1 and integers:
        y = y[:, 0]
    if y.ndim not in (1, 2) or 0 in y.shape[1:]:
        raise UserError(f"{where}: labels are {shape_text(y.shape)}; give one class number per image.")
    if not integers and not np.issubdtype(y.dtype, np.floating) and y.dtype != np.bool_:
        raise UserError(f"{where}: labels are {y.dtype}; give whole class numbers from 0.")
    if y.ndim == 2 or not integers:
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            rows = y.reshape(len(y), math.prod(y.shape[1:])).astype(np.float32)
        _check_targets(rows, where)
        return rows
    _check_classes(y, where, np.iinfo(np.int32).max)
    return y.astype(np.int64)


def _check_counts(x: Array | Tensor, y: Array | Tensor, where: str) -> None:
    if len(x) != len(y):
        raise UserError(f"{where}: {len(x)} images but {len(y)} labels.")


def _check_range(x: Array | Tensor, where: str) -> None:
    low, high = float(x.min()), float(x.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{where}: some pixels are not finite numbers.")
    if low < -ROUNDING or high > 1 + ROUNDING:
        raise UserError(f"{where}: pixels run from {low:.3g} to {high:.3g}; give uint8, or floats in [0, 1], not normalised.")


def _check_targets(y: Array | Tensor, where: str) -> None:
    finite = np.isfinite(y) if isinstance(y, np.ndarray) else torch.isfinite(y)
    if not bool(finite.all()):
        raise UserError(f"{where}: some targets are not finite numbers.")


def _check_classes(y: Array | Tensor, where: str, classes: int) -> None:
    if not len(y):
        return
    low, high = int(y.min()), int(y.max())
    if low < 0:
        raise UserError(f"{where}: label {low} is negative; class numbers start at 0.")
    if high >= classes:
        raise UserError(f"{where}: label {high} is not a class number below {classes}; is the number of classes right?")
