"""From a source to a data set: read, check, reduce, resize, split, and only then turn bytes into floats."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import UserError, one_line, shape_text
from gradveil.core.randomness import generator
from gradveil.data.catalogue import NAMED_SETS, NamedSet
from gradveil.data.dataset import DataSet
from gradveil.data.raw import MAX_CLASSES, MAX_NAME, MAX_SIDE, MIN_IMAGES, Images, Options, Raw, concat
from gradveil.data.readers.image_folder import decode
from gradveil.data.resize import resize_square
from gradveil.data.source import Source, resolve
from gradveil.data.split import exclude, image_keys, split, subsample
from gradveil.data.validation import to_batch

NONE = "none"


class DataName(NamedTuple):
    name: str
    description: str
    available: bool  # whether its files are present


def names() -> list[DataName]:
    """Every named data set."""
    return [DataName(named.name, named.description, named.available()) for named in NAMED_SETS.values()]


def load(source: object, *, seed: int = 0, num_classes: int | None = None, rows: bool = False) -> DataSet:
    """A data set from its source.

    Args:
        source: a name, a path, `pkg.mod:factory`, `torchvision:NAME`, a torch Dataset or (x, y). Settings follow a
            text: `cifar10:private=5000,public=tinyimagenet`; see `Options`.
        seed: of the split; the same seed gives the same split.
        num_classes: number of classes where neither the source nor its labels tell it.
        rows: whether a target may also be one row of numbers per image, for losses that take them.
    """
    if isinstance(source, DataSet):
        return source
    resolved = resolve(source)
    name, options, named = resolved.name, resolved.options, resolved.named
    raw = _gather(resolved, _with_size(options, named), seed)
    count, class_names = _targets(raw, num_classes, name, rows) or _classes(raw, num_classes, named, name)
    if raw.train.y.ndim == 2 and (options.split == "person" or options.public not in (None, NONE)):
        raise UserError(f"{name}: split=person and public=… need class labels; these labels are rows of numbers.")
    private, public, test = split(raw.train, raw.test, options, seed=seed, name=name)
    public_from = options.public if options.public not in (None, NONE) else None
    if public_from:
        public = _public_images(public_from, private, test, options, seed=seed, name=name)
    public_batch = to_batch(public)
    mean, std = _normalization(public_batch.x, named)
    return DataSet(name, to_batch(private), public_batch, to_batch(test), count, class_names, mean, std, public_from)


def _with_size(options: Options, named: NamedSet | None) -> Options:
    """The options, with the default size of a named set where no size is set."""
    return options if options.size or named is None else replace(options, size=named.size)


def _gather(source: Source, options: Options, seed: int) -> Raw:
    """At most `limit` decoded images, resized to `size`; training and test part alike."""
    name = source.name
    try:
        raw = source.read(options)
    except (OSError, UnicodeError) as error:  # no permission to read a file, or it is not the expected text
        raise UserError(f"{name}: {one_line(error)}") from None
    if not len(raw.train):
        raise UserError(f"{name}: holds no training images.")
    parts = [raw.train] if raw.test is None or not len(raw.test) else [raw.train, raw.test]
    total = sum(len(part) for part in parts)
    if total < MIN_IMAGES:
        raise UserError(f"{name}: {total} images are too few to split; at least {MIN_IMAGES} are needed.")
    if options.limit and options.limit < total:
        train = min(max(1, round(len(raw.train) * options.limit / total)), options.limit + 1 - len(parts))
        rng, limits = generator(seed, "limit"), (train, options.limit - train)
        parts = [subsample(part, limit, rng) for part, limit in zip(parts, limits, strict=False)]
    decoded = []
    for part in parts:
        x = part.x if isinstance(part.x, np.ndarray) else decode(part.x, options.size)
        x = resize_square(x, options.size) if options.size else x
        margins = [(0, 0), *[(options.pad, options.pad)] * 2, *[(0, 0)] * (x.ndim - 3)]
        decoded.append(Images(np.pad(x, margins) if options.pad else x, part.y))
    shapes = [part.pixels.shape[1:] for part in decoded]
    if len(set(shapes)) > 1:
        raise UserError(f"{name}: training images are {shape_text(shapes[0])}, test images {shape_text(shapes[1])}.")
    if max(shapes[0][:2]) > MAX_SIDE:
        raise UserError(f"{name}: images of {shape_text(shapes[0][:2])} pixels are too large; set size=N to shrink them.")
    return Raw(decoded[0], decoded[1] if len(decoded) > 1 else None, raw.class_names)


def _targets(raw: Raw, expected: int | None, name: str, rows: bool) -> tuple[int, tuple[str, ...]] | None:
    """The number of targets per image and their names; None where targets are classes."""
    y = raw.train.y
    if y.ndim == 1:
        return None
    if not rows:
        labels = shape_text(y.shape) if y.shape[1] > 1 else "floats"
        raise UserError(
            f"{name}: labels are {labels}; give one whole class number from 0 per image, or a loss that takes rows of "
            "numbers (multi-label, regression, or a custom loss)."
        )
    if expected is not None and expected != y.shape[1]:
        raise UserError(f"{name}: an image has {y.shape[1]} targets, not {expected}.")
    return y.shape[1], tuple(str(i) for i in range(y.shape[1]))


def _classes(raw: Raw, expected: int | None, named: NamedSet | None, name: str) -> tuple[int, tuple[str, ...]]:
    """The number of classes and their names."""
    if expected is not None and expected < 2:
        raise UserError(f"{name}: {expected} classes are too few; at least two are needed.")
    labels = np.concatenate([part.y for part in (raw.train, raw.test) if part is not None]).astype(np.int64)
    class_names = raw.class_names or (named.class_names if named else None) or ()
    count = expected or (named.num_classes if named else 0) or len(class_names)
    if not count:  # unknown: then every number up to the largest label must be a class
        count = int(labels.max()) + 1
        if missing := sorted(set(range(min(count, len(labels) + 1))) - set(labels.tolist())):
            raise UserError(f"{name}: no image has label {missing[0]}, but labels reach {count - 1}; number them without gaps.")
    if count > MAX_CLASSES or any(len(text) > MAX_NAME for text in class_names):
        raise UserError(f"{name}: at most {MAX_CLASSES:,} classes are read, with names of at most {MAX_NAME:,} characters.")
    if labels.max() >= count:
        raise UserError(f"{name}: labels reach {labels.max()}, but there are {count} classes (numbered from 0).")
    if count < 2:
        raise UserError(f"{name}: all images are of one class; at least two are needed.")
    return count, (*class_names[:count], *(str(i) for i in range(len(class_names), count)))


def _public_images(text: str, private: Images, test: Images, options: Options, *, seed: int, name: str) -> Images:
    """The images of another set as the public part, without those that are in this set already."""
    other = resolve(text)
    raw = _gather(other, _with_size(Options(size=options.size, pad=options.pad, limit=options.limit), other.named), seed)
    images = raw.train if raw.test is None else concat([raw.train, raw.test])
    if images.pixels.shape[1:] != private.pixels.shape[1:]:
        other_shape, shape = (shape_text(part.pixels.shape[1:]) for part in (images, private))
        raise UserError(f"{name}: images of public={text} are {other_shape}, these are {shape}; they must be alike.")
    images = exclude(images, {*image_keys(private), *image_keys(test)})
    if not len(images):
        raise UserError(f"{name}: every image of public={text} is in this set already.")
    return images


def _normalization(public: Tensor, named: NamedSet | None) -> tuple[Tensor, Tensor]:
    """Mean and std per channel: published, or measured on the public part; 0.5 and 0.5 where it is empty."""
    channels = public.shape[1]
    if named and named.normalization and len(named.normalization[0]) == channels:
        return torch.tensor(named.normalization[0]), torch.tensor(named.normalization[1])
    if not len(public):
        return torch.full((channels,), 0.5), torch.full((channels,), 0.5)
    std, mean = torch.std_mean(public, dim=(0, 2, 3), correction=0)
    return mean, torch.where(std > 1e-3, std, torch.ones_like(std))  # a constant channel is only shifted
