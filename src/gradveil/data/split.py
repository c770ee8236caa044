"""Sharing out a data set: private, public and test parts, stratified by class, with no image in two of them."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection

import numpy as np
import torch

from gradveil.core.errors import UserError
from gradveil.core.types import generator
from gradveil.data.raw import Array, Images, Options, concat

TEST_GIVEN = (0.6, 0.4, 0.0)  # shares of private, public and test where the publisher has a test part …
TEST_DRAWN = (0.4, 0.4, 0.2)  # … and where it has none


def spread(labels: Array, random: torch.Generator) -> Array:
    """A random order whose every prefix holds the classes in their proportions, as nearly as whole images allow."""
    if labels.ndim == 2:  # rows of targets: nothing to stratify by
        labels = np.zeros(len(labels), dtype=np.int64)
    shuffled = torch.randperm(len(labels), generator=random).numpy()
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]  # class by class, each in random order
    _, start, which, count = np.unique(labels[order], return_index=True, return_inverse=True, return_counts=True)
    # Where in its class an image stands, as a fraction; the offset decides fairly which small class comes first.
    offset = torch.rand(len(count), generator=random, dtype=torch.float64).numpy()
    fraction = (np.arange(len(labels)) - start[which] + offset[which]) / count[which]
    return order[np.argsort(fraction, kind="stable")]


def keys(images: Images) -> list[bytes]:
    """One key an image, equal for equal images at 8 bits, so that floats and bytes can be compared."""
    x = images.pixels
    if x.dtype != np.uint8:
        x = np.rint(x * 255).astype(np.uint8)
    return [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in x]


def without(images: Images, taken: Collection[bytes]) -> Images:
    """The images that are not among `taken`."""
    return images.take(np.array([i for i, key in enumerate(keys(images)) if key not in taken], dtype=np.int64))


def thin(images: Images, most: int, random: torch.Generator) -> Images:
    """At most so many images, stratified by class, in the order they had."""
    return images if len(images) <= most else images.take(np.sort(spread(images.y, random)[:most]))


def split(
    train: Images, test: Images | None, options: Options, *, seed: int, name: str
) -> tuple[Images, Images, Images]:
    """Private, public and test images; the public part is left empty where `options.public` says where it is from."""
    random = generator(seed, "split")
    people = None
    if options.split == "person":
        people, train, test = _people_apart(train, test, options, random, name)
    if test is not None:  # a publisher's test part stays as it is; copies of its images leave the rest
        train = without(train, set(keys(test)))

    counts = sizes(len(train), options, test_given=test is not None, name=name)
    order = spread(train.y, random)[: sum(counts)]
    part = np.repeat(np.arange(3), counts)  # of the image at each place in `order`
    key, copies = keys(train), defaultdict(list)
    for place, image in enumerate(order):
        copies[key[image]].append(place)
    for places in copies.values():
        part[places] = part[places].min()  # copies of one image follow the most private of them

    private, public, drawn = (train.take(order[part == p]) for p in range(3))
    test = drawn if test is None else test
    if people is not None:
        public = without(people, {*keys(private), *keys(test)})
    parts = {"private": private, "test": test}
    if options.public is None and options.private is None:  # who asks for all images to be private leaves none public
        parts["public"] = public
    for what, images in parts.items():
        if not len(images):
            raise UserError(
                f"{name}: no images are left for the {what} part; it needs more images, or fewer private ones."
            )
    return private, public, test


def sizes(n: int, options: Options, *, test_given: bool, name: str) -> tuple[int, int, int]:
    """How many of `n` images become private, public and test. With nobody else to have them, the rest stays unused."""
    private, public, test = TEST_GIVEN if test_given else TEST_DRAWN
    if options.public:  # it comes from elsewhere, so its share is private too
        private, public = private + public, 0.0
    if options.split == "person":  # it has been taken already
        public = 0.0
    asked = round(n * private / (private + public + test)) if options.private is None else options.private
    if asked > n:
        raise UserError(f"{name}: private={asked} asks for more images than there are to share out ({n}).")
    shown = round((n - asked) * public / (public + test)) if public else 0
    return asked, shown, n - asked - shown if test else 0


def _people_apart(
    train: Images, test: Images | None, options: Options, random: torch.Generator, name: str
) -> tuple[Images, Images, Images | None]:
    """The images of two fifths of the people (labels), then what is left of `train` and `test`."""
    if options.public:
        raise UserError(f"{name}: split=person draws the public part from this set; leave out public={options.public}.")
    people = np.unique(train.y)
    public = people[torch.randperm(len(people), generator=random).numpy()[: round(len(people) * TEST_DRAWN[1])]]
    if not len(public):
        raise UserError(f"{name}: split=person needs images of more than {len(people)} people.")
    parts = [train] if test is None else [train, test]
    apart = concat([p.take(np.flatnonzero(np.isin(p.y, public))) for p in parts])
    rest = [p.take(np.flatnonzero(~np.isin(p.y, public))) for p in parts]
    return apart, rest[0], rest[1] if len(rest) > 1 else None
