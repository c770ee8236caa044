"""ATS, automatic transformation search: train on transformed images only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError, shown
from gradveil.core.randomness import Stream, generator
from gradveil.core.settings import settings
from gradveil.core.types import Batch, Tensors
from gradveil.defenses import Defense, Step, defense
from gradveil.defenses.data.ats.transforms import FUNCTIONS, apply
from gradveil.storage.reading import read_json

Policy = tuple[int, ...]
LONGEST = 3  # functions in a policy at most

MAX_TEXT = 1_000  # characters; no two of the fifty functions may be shared, so policies are short
_POLICIES = re.compile(r"\d+(-\d+)*(\+\d+(-\d+)*)*")


@defense("ats", random=True)
@settings
class ATS(Defense):
    """Replace every image by a transformed one, with a policy that was searched to make its gradient hard to invert.

    Gao et al. 2021. A policy is up to three functions of a library of fifty, written by their indices: `3-1-7`. Policies
    joined by `+` make a hybrid: every image draws one of them. `gradveil search` searches policies for a data set. The
    default is the policy published for CIFAR-100 on ResNet20. The authors crop and flip first, in training and under
    attack, and so does this. The paper lets participants transform their images once, offline, which is the default; the
    authors' code draws anew in every epoch (`every_step`).

    Secrets: `ats.policy`, `ats.signs`, `ats.crop` and `ats.flip`, the draws for each image (see `Draw`).

    Args:
        policy: indices, `random` (the baseline of the paper), the JSON file of a search, or `none`: crop and flip alone, the
            control that policies are compared with.
        seed: of the policy that `random` draws; the paper averages over ten of them.
        crop: pixels of padding before the random crop. The authors: 4.
        flip: mirror half of the images. The authors do; digits become others by it.
        every_step: draw anew at every step of training, instead of once.

    Example:
        >>> gv.protect(model, "ats:policy=21-13-3+7-4-15", data=(x, y))
    """

    policy: str = "3-1-7+43-18-18"
    seed: int = Field(default=0, ge=0)
    crop: int = Field(default=4, ge=0)
    flip: bool = True
    every_step: bool = False

    def __post_init__(self) -> None:
        self.policies()  # report a policy that cannot be read before any work

    def policies(self) -> tuple[Policy, ...]:
        """The policies of which every image draws one."""
        if self.policy == "none":
            return ((),)
        if self.policy == "random":
            return (random_policy(generator(self.seed, "ats-random")),)
        if self.policy.endswith(".json"):
            return parse_policies(read_policy(Path(self.policy)))
        return parse_policies(self.policy)

    def changes(self, stage: str) -> bool:
        return stage == ("batch" if self.every_step else "data")

    def data(self, batch: Batch, step: Step) -> Batch:
        return batch if self.every_step else self._transformed(batch, step)

    def batch(self, batch: Batch, step: Step) -> Batch:
        return self._transformed(batch, step) if self.every_step else batch

    def _transformed(self, batch: Batch, step: Step) -> Batch:
        draw = Draw.make(len(batch), self.policies(), self.crop, self.flip, step.rng)
        step.secrets.update(draw.secrets())
        return Batch(transform(batch.x, self.policies(), draw, self.crop), batch.y)


@dataclass(frozen=True)
class Draw:
    """The random draws for each of n images, which are never sent."""

    policy: Tensor  # n: number of the policy
    signs: Tensor  # n × functions, ±1: the direction of each function
    crop: Tensor  # n × 2: row and column of the padded image where the crop begins
    flip: Tensor  # n: whether the image is mirrored

    @staticmethod
    def make(images: int, policies: tuple[Policy, ...], crop: int, flip: bool, rng: Stream) -> Draw:
        longest = max(map(len, policies))
        return Draw(
            rng.integers(0, len(policies), (images,)),
            rng.integers(0, 2, (images, longest)) * 2.0 - 1,
            rng.integers(0, 2 * crop + 1, (images, 2)),
            (rng.uniform((images,)) < 0.5) & flip,
        )

    def secrets(self) -> Tensors:
        return {f"ats.{name}": value for name, value in vars(self).items()}


def transform(images: Tensor, policies: tuple[Policy, ...], draw: Draw, crop: int) -> Tensor:
    """Crop, flip, then apply the policy that each image drew."""
    height, width = images.shape[2:]
    padded = F.pad(images, (crop, crop, crop, crop))
    rows = draw.crop[:, :1] + torch.arange(height)
    columns = draw.crop[:, 1:] + torch.arange(width)
    columns = torch.where(draw.flip[:, None], columns.flip(1), columns)
    each = torch.arange(len(images))
    cropped = padded[each[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    result = torch.empty_like(images)
    for number, policy in enumerate(policies):
        rows = draw.policy == number
        result[rows] = apply(cropped[rows], policy, draw.signs[rows])
    return result


def parse_policies(text: str) -> tuple[Policy, ...]:
    """`3-1-7+43-18-18` as tuples of indices. Policies that are combined may not share a function (section 4.4)."""
    if len(text) > MAX_TEXT or not _POLICIES.fullmatch(text):
        raise UserError(f"{shown(text)} is not an ATS policy; write 3-1-7 or 3-1-7+43-18-18, random, or a file.json.")
    policies = tuple(tuple(int(i) for i in part.split("-")) for part in text.split("+"))
    for policy in policies:
        if len(policy) > LONGEST:
            raise UserError(f"ATS policy '{text}': a policy has at most {LONGEST} functions.")
        if max(policy) >= len(FUNCTIONS):
            raise UserError(f"ATS policy '{text}': there is no function {max(policy)}; the last is {len(FUNCTIONS) - 1}.")
    for i, policy in enumerate(policies):
        if shared := set(policy) & {index for other in policies[:i] for index in other}:
            raise UserError(f"ATS policy '{text}': combined policies may not share function {min(shared)}.")
    return policies


def write_policy(policies: tuple[Policy, ...]) -> str:
    return "+".join("-".join(map(str, policy)) for policy in policies)


def random_policy(rng: Stream) -> Policy:
    """As the search of the authors draws it: three positions, each with one of fifty functions or empty, not all empty."""
    while True:
        drawn = rng.integers(-1, len(FUNCTIONS), (LONGEST,)).tolist()
        if policy := tuple(index for index in drawn if index >= 0):
            return policy


def read_policy(path: Path) -> str:
    """The policy in a file that a search has written."""
    try:
        content = read_json(path)
    except UserError as error:
        raise UserError(f"cannot read an ATS policy, which `gradveil search` writes: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("policy"), str):
        raise UserError(f"{path} holds no 'policy'; `gradveil search` writes a policy file.")
    return str(content["policy"])
