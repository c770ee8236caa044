"""From a source to a data set: read, check, thin, resize, split, and only then turn bytes into floats."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.types import Batch, generator
from gradveil.data.catalogue import KNOWN, Known
from gradveil.data.dataset import DataSet
from gradveil.data.raw import MAX_SIDE, MIN_IMAGES, Images, Options, Raw, concat, one_line, shape_text
from gradveil.data.readers.image_folder import decode
from gradveil.data.resize import fit
from gradveil.data.source import Source, resolve
from gradveil.data.split import keys, split, thin, without

NONE = "none"


class Name(NamedTuple):
    name: str
    description: str
    available: bool  # whether its files are here right now


def names() -> list[Name]:
    """Every named data set."""
    return [Name(known.name, known.about, known.available()) for known in KNOWN.values()]


def load(source: object, *, seed: int = 0, num_classes: int | None = None, rows: bool = False) -> DataSet:
    """A data set from a name, a path, `pkg.mod:factory`, `torchvision:NAME`, a torch Dataset or (x, y).

    Settings follow the name: `cifar10:private=5000,public=tinyimagenet`; see `Options`. One seed, one split.
    With `rows`, targets may also be a row of numbers for each image, for losses that take them.
    """
    if isinstance(source, DataSet):
        return source
    found = resolve(source)
    name, options, known = found.name, found.options, found.known
    raw = _gather(found, _sized(options, known), seed)
    count, class_names = _targets(raw, num_classes, name, rows) or _classes(raw, num_classes, known, name)
    if raw.train.y.ndim == 2 and (options.split == "person" or options.public not in (None, NONE)):
        raise UserError(f"{name}: split=person and public=… need class labels, and these are rows of numbers.")
    private, public, test = split(raw.train, raw.test, options, seed=seed, name=name)
    borrowed = options.public if options.public not in (None, NONE) else None
    if borrowed:
        public = _borrow(borrowed, private, test, options, seed=seed, name=name)
    shared = _batch(public)
    mean, std = _normalisation(shared.x, known)
    return DataSet(name, _batch(private), shared, _batch(test), count, class_names, mean, std, borrowed)


def _sized(options: Options, known: Known | None) -> Options:
    """The options with the size that the set has by default."""
    if options.size or known is None or known.size is None:
        return options
    return Options(**{**vars(options), "size": known.size})


def _gather(source: Source, options: Options, seed: int) -> Raw:
    """As many images as are wanted, decoded, of the size that is wanted; both parts alike."""
    name = source.name
    try:
        raw = source.read(options)
    except (OSError, UnicodeError) as error:  # a file that may not be read, or is not the text it should be
        raise UserError(f"{name}: {one_line(error)}") from None
    parts = [raw.train] if raw.test is None else [raw.train, raw.test]
    total = sum(len(part) for part in parts)
    if total < MIN_IMAGES:
        raise UserError(f"{name}: {total} images are too few to share out; at least {MIN_IMAGES} are needed.")
    if options.limit and options.limit < total:
        train = min(max(1, round(len(raw.train) * options.limit / total)), options.limit + 1 - len(parts))
        random = generator(seed, "limit")
        parts = [thin(part, most, random) for part, most in zip(parts, (train, options.limit - train), strict=False)]
    done = []
    for part in parts:
        x = part.x if isinstance(part.x, np.ndarray) else decode(part.x, options.size)
        done.append(Images(fit(x, options.size) if options.size else x, part.y))
    shapes = [part.pixels.shape[1:] for part in done]
    if len(set(shapes)) > 1:
        raise UserError(f"{name}: training images are {shape_text(shapes[0])}, test images {shape_text(shapes[1])}.")
    if max(shapes[0][:2]) > MAX_SIDE:
        raise UserError(
            f"{name}: images of {shapes[0][0]}×{shapes[0][1]} pixels are too large; size=N makes them smaller."
        )
    return Raw(done[0], done[1] if len(done) > 1 else None, raw.class_names)


def _targets(raw: Raw, given: int | None, name: str, rows: bool) -> tuple[int, tuple[str, ...]] | None:
    """How many numbers an image has for its target, or None where targets are classes."""
    y = raw.train.y
    if y.ndim == 1:
        return None
    if not rows:
        found = shape_text(y.shape) if y.shape[1] > 1 else "floats"
        raise UserError(
            f"{name}: labels are {found}; give one whole class number from 0 for each image, or a loss that takes rows "
            "of numbers (multi-label, regression, or your own)."
        )
    if given is not None and given != y.shape[1]:
        raise UserError(f"{name}: an image has {y.shape[1]} targets, not {given}.")
    return y.shape[1], tuple(str(i) for i in range(y.shape[1]))


def _classes(raw: Raw, given: int | None, known: Known | None, name: str) -> tuple[int, tuple[str, ...]]:
    """How many classes there are, and what they are called."""
    if given is not None and given < 2:
        raise UserError(f"{name}: {given} classes are too few; at least two are needed.")
    labels = np.concatenate([part.y for part in (raw.train, raw.test) if part is not None])
    class_names = raw.class_names or (known.class_names if known else None) or ()
    count = given or (known.num_classes if known else 0) or len(class_names)
    if not count:  # nobody says: then every number up to the largest must be a class
        count = int(labels.max()) + 1
        if missing := sorted(set(range(min(count, len(labels) + 1))) - set(labels.tolist())):
            raise UserError(
                f"{name}: no image has label {missing[0]}, but labels reach {count - 1}; number them without gaps."
            )
    if labels.max() >= count:
        raise UserError(f"{name}: labels reach {labels.max()}, but there are {count} classes (numbered from 0).")
    if count < 2:
        raise UserError(f"{name}: all images are of one class; at least two are needed.")
    return count, (*class_names[:count], *(str(i) for i in range(len(class_names), count)))


def _borrow(text: str, private: Images, test: Images, options: Options, *, seed: int, name: str) -> Images:
    """Another set's images as the public part, but for those that are here already."""
    other = resolve(text)
    sized = _sized(Options(size=options.size, limit=options.limit), other.known)
    raw = _gather(other, sized, seed)
    images = raw.train if raw.test is None else concat([raw.train, raw.test])
    if images.pixels.shape[1:] != private.pixels.shape[1:]:
        theirs, ours = (shape_text(part.pixels.shape[1:]) for part in (images, private))
        raise UserError(f"{name}: images of public={text} are {theirs}, these are {ours}; they must be alike.")
    images = without(images, {*keys(private), *keys(test)})
    if not len(images):
        raise UserError(f"{name}: every image of public={text} is in this set already.")
    return images


def _batch(images: Images) -> Batch:
    pixels = torch.from_numpy(np.array(images.pixels.transpose(0, 3, 1, 2), order="C"))  # a copy: nothing is shared
    x = pixels.float().div_(255) if pixels.dtype == torch.uint8 else pixels.float()
    return Batch(x, torch.tensor(images.y))


def _normalisation(public: Tensor, known: Known | None) -> tuple[Tensor, Tensor]:
    """Published constants, or what anyone can measure on the public part (one half each where there is none)."""
    channels = public.shape[1]
    if known and known.norm and len(known.norm[0]) == channels:
        return torch.tensor(known.norm[0]), torch.tensor(known.norm[1])
    if not len(public):
        return torch.full((channels,), 0.5), torch.full((channels,), 0.5)
    std, mean = torch.std_mean(public, dim=(0, 2, 3), correction=0)
    return mean, torch.where(std > 1e-3, std, torch.ones_like(std))  # a channel of one value is only shifted
