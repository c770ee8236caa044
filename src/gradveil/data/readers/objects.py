"""Data that is already in memory: (x, y) as tensors or arrays, or any map-style torch Dataset."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from gradveil.core.errors import UserError
from gradveil.data.raw import PICTURE_CHANNELS, Array, Images, Raw, checked, one_line, shape_text


def read_object(source: object, name: str) -> Raw:
    if isinstance(source, TensorDataset) and len(source.tensors) == 2:
        return Raw(_pair(source.tensors[0], source.tensors[1], name))
    if isinstance(source, (tuple, list)) and len(source) == 2:
        return Raw(_pair(source[0], source[1], name))
    if isinstance(source, Dataset) or (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        return Raw(_items(source, name), None, _class_names(source))
    raise UserError(
        f"{name}: a {type(source).__name__} is not data; give (x, y), or a torch Dataset of (image, label)."
    )


def _pair(x: Any, y: Any, name: str) -> Images:
    if not all(isinstance(part, (torch.Tensor, np.ndarray)) for part in (x, y)):
        raise UserError(
            f"{name}: images and labels must be tensors or arrays, not {type(x).__name__} and {type(y).__name__}."
        )
    return checked(_channels_last(x), _array(y), name)


def _items(source: object, name: str) -> Images:
    """Item by item, since any of them may be computed when it is asked for."""
    if not isinstance(source, Sized):
        raise UserError(f"{name}: a Dataset without a length cannot be split; give a map-style one.")
    images: list[Array] = []
    labels: list[Array] = []
    for i in range(len(source)):
        try:
            item = cast(Any, source)[i]
        except Exception as error:  # the user's own code: whatever it raises is the message
            raise UserError(f"{name}: item {i} raised {type(error).__name__}: {one_line(error)}") from None
        if not isinstance(item, (tuple, list)) or len(item) < 2:
            raise UserError(f"{name}: item {i} is a {type(item).__name__}; give (image, label).")
        image, label = _image(item[0], f"{name}: item {i}"), np.asarray(item[1])
        if images and (image.shape, image.dtype) != (images[0].shape, images[0].dtype):
            one, other = (f"{shape_text(a.shape)} {a.dtype}" for a in (images[0], image))
            raise UserError(f"{name}: item {i} is {other}, item 0 is {one}; all images must be alike.")
        if labels and label.shape != labels[0].shape:
            one, other = (shape_text(a.shape) for a in (labels[0], label))
            raise UserError(f"{name}: the label of item {i} is {other}, that of item 0 is {one}; all must be alike.")
        images.append(image)
        labels.append(label)
    if not images:
        raise UserError(f"{name}: the Dataset is empty.")
    return checked(np.stack(images), np.stack(labels), name)


def _image(image: Any, where: str) -> Array:
    if isinstance(image, Image.Image):
        image = np.asarray(image)
    if not isinstance(image, (torch.Tensor, np.ndarray)) or image.ndim not in (2, 3):
        raise UserError(f"{where}: the image must be a tensor (C×H×W), an array (H×W×C) or a PIL image.")
    return _channels_last(image[None])[0]


def _channels_last(x: Any) -> Array:
    """Tensors come as n×C×H×W and arrays as n×H×W×C, unless their sizes say otherwise."""
    array = _array(x)
    if array.ndim != 4:
        return array
    first, last = array.shape[1] <= PICTURE_CHANNELS, array.shape[3] <= PICTURE_CHANNELS
    channels_first = first if first != last else isinstance(x, torch.Tensor)
    return array.transpose(0, 2, 3, 1) if channels_first else array


def _array(x: Any) -> Array:
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        return (x.float() if x.is_floating_point() else x).numpy()
    return np.asarray(x)


def _class_names(source: object) -> tuple[str, ...] | None:
    names = getattr(source, "classes", None)
    return tuple(map(str, names)) if isinstance(names, (list, tuple)) else None
