"""Splitting a data set into private, public and test parts, stratified by class, with no image in two of them."""

import hashlib
from collections import defaultdict
from collections.abc import Collection

import numpy as np
import torch

from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.data.raw import Array, Images, Indices, Options, concat

TEST_PUBLISHED = (0.6, 0.4, 0.0)  # shares of private, public and test where a test part is published …
TEST_DRAWN = (0.4, 0.4, 0.2)  # … and where the test part is drawn


def stratified_order(labels: Array, rng: torch.Generator) -> Indices:
    """A random order whose every prefix holds the classes in their proportions, as nearly as whole images allow."""
    if labels.ndim == 2:  # rows of targets: no classes to stratify by
        labels = np.zeros(len(labels), dtype=np.int64)
    shuffled = torch.randperm(len(labels), generator=rng).numpy()
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]  # class by class, each in random order
    _, start, group, count = np.unique(labels[order], return_index=True, return_inverse=True, return_counts=True)
    # The position of an image in its class, as a fraction; a random offset decides which small class comes first.
    offset = torch.rand(len(count), generator=rng, dtype=torch.float64).numpy()
    fraction = (np.arange(len(labels)) - start[group] + offset[group]) / count[group]
    return order[np.argsort(fraction, kind="stable")]


def image_keys(images: Images) -> list[bytes]:
    """One key per image, equal for images that are equal at 8 bits, so that floats and bytes can be compared."""
    x = images.pixels
    if x.dtype != np.uint8:
        x = np.rint(x.astype(np.float32, copy=False) * 255).astype(np.uint8)
    return [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in x]


def exclude(images: Images, keys: Collection[bytes]) -> Images:
    """The images whose key is not among `keys`."""
    return images.take(np.array([i for i, key in enumerate(image_keys(images)) if key not in keys], dtype=np.int64))


def subsample(images: Images, limit: int, rng: torch.Generator) -> Images:
    """At most `limit` images, stratified by class, in their old order."""
    return images if len(images) <= limit else images.take(np.sort(stratified_order(images.y, rng)[:limit]))


def split(train: Images, test: Images | None, options: Options, *, seed: int, name: str) -> tuple[Images, Images, Images]:
    """Private, public and test images. The public part is empty where `options.public` names another source for it."""
    rng = generator(seed, "split")
    public_people = None
    if options.split == "person":
        public_people, train, test = _separate_people(train, test, options, rng, name)
    if test is not None:  # a published test part stays as it is; copies of its images leave the training part
        train = exclude(train, set(image_keys(test)))

    counts = sizes(len(train), options, test_published=test is not None, name=name)
    order = stratified_order(train.y, rng)[: sum(counts)]
    part = np.repeat(np.arange(3), counts)  # part[i]: where image order[i] goes
    keys, copies = image_keys(train), defaultdict(list)
    for position, image in enumerate(order):
        copies[keys[image]].append(position)
    for positions in copies.values():
        part[positions] = part[positions].min()  # all copies of an image go to the most private part among them

    private, public, drawn = (train.take(order[part == p]) for p in range(3))
    test = drawn if test is None else test
    if public_people is not None:
        public = exclude(public_people, {*image_keys(private), *image_keys(test)})
    parts = {"private": private, "test": test}
    if options.public is None and options.private is None:  # `private` may take all images; then none is public
        parts["public"] = public
    for label, images in parts.items():
        if not len(images):
            raise UserError(f"{name}: no images are left for the {label} part; it needs more images, or fewer private ones.")
    return private, public, test


def sizes(n: int, options: Options, *, test_published: bool, name: str) -> tuple[int, int, int]:
    """How many of `n` images become private, public and test; the rest is unused where neither has a share of it."""
    private, public, test = TEST_PUBLISHED if test_published else TEST_DRAWN
    if options.public:  # the public part comes from another source, so its share is private too
        private, public = private + public, 0.0
    if options.split == "person":  # the public part has been separated already
        public = 0.0
    num_private = round(n * private / (private + public + test)) if options.private is None else options.private
    if num_private > n:
        raise UserError(f"{name}: private={num_private} asks for more images than there are to split ({n}).")
    num_public = round((n - num_private) * public / (public + test)) if public else 0
    return num_private, num_public, n - num_private - num_public if test else 0


def _separate_people(
    train: Images, test: Images | None, options: Options, rng: torch.Generator, name: str
) -> tuple[Images, Images, Images | None]:
    """The images of two fifths of the people (labels), and the rest of `train` and of `test`."""
    if options.public:
        raise UserError(f"{name}: split=person draws the public part from this set; leave out public={options.public}.")
    people = np.unique(train.y)
    public = people[torch.randperm(len(people), generator=rng).numpy()[: round(len(people) * TEST_DRAWN[1])]]
    if not len(public):
        raise UserError(f"{name}: split=person needs images of more than {len(people)} people.")
    parts = [train] if test is None else [train, test]
    separated = concat([p.take(np.flatnonzero(np.isin(p.y, public))) for p in parts])
    rest = [p.take(np.flatnonzero(~np.isin(p.y, public))) for p in parts]
    return separated, rest[0], rest[1] if len(rest) > 1 else None
