"""Data in memory: (x, y) as tensors or arrays, or any map-style torch Dataset."""

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from gradveil.core.errors import UserError, one_line, shape_text
from gradveil.data.raw import PICTURE_CHANNELS, Array, Images, Raw
from gradveil.data.validation import checked


@runtime_checkable
class Items(Protocol):
    """Pairs (image, label) by number, as a map-style Dataset holds them."""

    def __getitem__(self, index: int) -> object: ...

    def __len__(self) -> int: ...


def read_object(source: object, name: str) -> Raw:
    if isinstance(source, TensorDataset) and len(source.tensors) == 2:
        return Raw(_pair(source.tensors[0], source.tensors[1], name))
    if isinstance(source, (tuple, list)) and len(source) == 2:
        return Raw(_pair(source[0], source[1], name))
    if isinstance(source, Items):
        return Raw(_stacked(source, name), None, _class_names(source))
    if isinstance(source, Dataset):
        raise UserError(f"{name}: a Dataset without a length cannot be split; give a map-style one.")
    raise UserError(f"{name}: a {type(source).__name__} is not data; give (x, y), or a torch Dataset of (image, label).")


def _pair(x: object, y: object, name: str) -> Images:
    if not isinstance(x, (torch.Tensor, np.ndarray)) or not isinstance(y, (torch.Tensor, np.ndarray)):
        raise UserError(f"{name}: images and labels must be tensors or arrays, not {type(x).__name__} and {type(y).__name__}.")
    return checked(_channels_last(x), _array(y), name)


def _stacked(source: Items, name: str) -> Images:
    """All items of a Dataset, read one by one, since an item may be computed on access."""
    images: list[Array] = []
    labels: list[Array] = []
    for i in range(len(source)):
        try:
            item = source[i]
        except Exception as error:  # code of the user may raise anything; the text is passed on
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


def _image(image: object, where: str) -> Array:
    if isinstance(image, Image.Image):
        image = np.asarray(image)
    if not isinstance(image, (torch.Tensor, np.ndarray)) or image.ndim not in (2, 3):
        raise UserError(f"{where}: the image must be a tensor (C×H×W), an array (H×W×C) or a PIL image.")
    pixels: Array = _channels_last(image[None])[0]
    return pixels


def _channels_last(x: torch.Tensor | Array) -> Array:
    """n × H × W × C. Tensors come as n × C × H × W and arrays as n × H × W × C, unless their sizes tell otherwise."""
    array = _array(x)
    if array.ndim != 4:
        return array
    first, last = array.shape[1] <= PICTURE_CHANNELS, array.shape[3] <= PICTURE_CHANNELS
    channels_first = first if first != last else isinstance(x, torch.Tensor)
    return array.transpose(0, 2, 3, 1) if channels_first else array


def _array(x: torch.Tensor | Array) -> Array:
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        return np.asarray((x.float() if x.is_floating_point() else x).numpy())
    return x


def _class_names(source: object) -> tuple[str, ...] | None:
    names = getattr(source, "classes", None)
    return tuple(map(str, names)) if isinstance(names, (list, tuple)) else None
