"""Random streams: one per purpose, so that no draw depends on the order of work.

Defenses draw from a `Stream`. An audit gives them a `TorchStream`, which everybody can repeat from its key. Real protection
gives them a `SecretStream`, of which no number of outputs tells anything about the others.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

REPRODUCIBLE = "the protection is reproducible: everyone who knows the seed can undo it."
_BLOCK = 1 << 18  # words that are drawn at once
_GRID = 24  # noise is added on a grid of its scale divided by two to this power


class Stream(Protocol):
    """What a defense draws from. Tensors are on the CPU; `added_normal` and `added_laplace` keep device and type."""

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal numbers (float32)."""

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers in [0, 1)."""

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Whole numbers from `low` to `high` - 1."""

    def permutation(self, count: int) -> Tensor:
        """The numbers from 0 to `count` - 1 in a random order."""

    def added_normal(self, values: Tensor, std: float) -> Tensor:
        """`values` with noise of this standard deviation on every entry."""

    def added_laplace(self, values: Tensor, scale: float) -> Tensor:
        """`values` with Laplace noise of this scale on every entry."""


class TorchStream(torch.Generator):
    """Draws of a torch generator: fast, repeatable, and predictable from 624 outputs. For audits."""

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(tuple(shape), generator=self, dtype=dtype)

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, tuple(shape), generator=self, dtype=dtype)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self)

    def added_normal(self, values: Tensor, std: float) -> Tensor:
        return values + std * self.normal(values.shape).to(values)

    def added_laplace(self, values: Tensor, scale: float) -> Tensor:
        centred = self.uniform(values.shape).to(values) - 0.5  # by the inverse of its distribution function
        return values + scale * (-centred.sign() * torch.log1p((-2 * centred.abs()).clamp_min(-1 + 1e-7)))


def generator(*key: int | str) -> TorchStream:
    """A stream for (seed, victim, draw, purpose …). Equal keys give equal streams.

    For audits only: torch uses 32 bits of a seed, so that a stream can be found by trying. `Streams` is for protection.
    """
    digest = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
    return torch_stream(int.from_bytes(digest[:8], "little") >> 1)


def torch_stream(seed: int) -> TorchStream:
    stream = TorchStream()
    stream.manual_seed(seed)
    return stream


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seed torch's global stream inside the block, for code that can use no other; restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator(*key).initial_seed())
        yield


class SecretStream:
    """Draws of SHAKE-256 from a secret key, which is replaced at every draw: outputs reveal neither later nor earlier ones.

    Noise is added in double precision, and the sum is rounded to a grid that depends on the scale of the noise alone. So the
    set of possible sums is the same for all values, and the last bits of a sum do not tell which value it hides (Mironov
    2012, "On significance of the least significant bits for differential privacy").
    """

    def __init__(self, key: bytes):
        self._key = hashlib.sha256(key).digest()

    def _words(self, count: int) -> NDArray[np.uint64]:
        output = hashlib.shake_256(self._key).digest(32 + 8 * count)
        self._key = output[:32]
        return np.frombuffer(output, dtype="<u8", offset=32)

    def _drawn(self, shape: Sequence[int], draw: Callable[[int], Tensor], dtype: torch.dtype) -> Tensor:
        """`draw` gives that many numbers; it is called for parts of the tensor, which bounds memory."""
        values = torch.empty(math.prod(shape), dtype=dtype)
        for part in values.split(_BLOCK) if len(values) else ():
            part.copy_(draw(len(part)))
        return values.reshape(tuple(shape))

    def _fractions(self, count: int, bits: int = 53) -> Tensor:
        """Multiples of two to the power of -`bits` in [0, 1)."""
        return torch.from_numpy((self._words(count) >> np.uint64(64 - bits)).astype(np.float64)) * 2.0**-bits

    def _normals(self, count: int) -> Tensor:
        """Box and Muller, up to 8.5 standard deviations."""
        half = -(-count // 2)
        one, two = self._fractions(2 * half).split(half)
        radius, angle = (-2 * torch.log(1 - one)).sqrt(), 2 * math.pi * two
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]

    def _laplacian(self, count: int) -> Tensor:
        words = self._words(count)
        size = -torch.log1p(torch.from_numpy((words >> np.uint64(11)).astype(np.float64)) * -(2.0**-53))
        return torch.where(torch.from_numpy((words & np.uint64(1)).astype(bool)), size, -size)

    def normal(self, shape: Sequence[int]) -> Tensor:
        return self._drawn(shape, self._normals, torch.float32)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        bits = 53 if dtype == torch.float64 else 24  # more would be rounded to 1
        return self._drawn(shape, lambda count: self._fractions(count, bits), dtype)

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        if not 0 < high - low < 2**63:
            raise ValueError(f"no whole numbers from {low} to {high - 1}")
        span = np.uint64(high - low)  # numbers differ in their chances by less than span / 2**64
        return self._drawn(shape, lambda n: torch.from_numpy((self._words(n) % span).astype(np.int64)) + low, dtype)

    def permutation(self, count: int) -> Tensor:
        return torch.from_numpy(np.argsort(self._words(count), kind="stable"))

    def added_normal(self, values: Tensor, std: float) -> Tensor:
        return self._added(values, std, self._normals)

    def added_laplace(self, values: Tensor, scale: float) -> Tensor:
        return self._added(values, scale, self._laplacian)

    def _added(self, values: Tensor, scale: float, draw: Callable[[int], Tensor]) -> Tensor:
        if not scale > 0:
            return values
        step = 2.0 ** (math.floor(math.log2(scale)) - _GRID)
        if not step > 0:
            raise ValueError(f"noise of scale {scale} is too small for floating point numbers")
        noisy = self._drawn(values.shape, draw, torch.float64).mul_(scale).add_(values.detach().cpu().double())
        return noisy.div_(step).round_().mul_(step).to(values)


@dataclass(frozen=True)
class Streams:
    """Random streams for protection, each from a secret and the stream's key.

    `fresh` adds new randomness of the operating system to every stream: no two streams are alike, whatever their keys.
    """

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    fresh: bool = True

    @classmethod
    def of_seed(cls, seed: int) -> Streams:
        """Streams that everyone who knows the seed can repeat."""
        return cls(f"reproducible {seed}".encode(), fresh=False)

    def __call__(self, *key: int | str) -> SecretStream:
        parts = [self.secret, *(str(k).encode() for k in key), secrets.token_bytes(32) if self.fresh else b""]
        return SecretStream(b"".join(hashlib.sha256(part).digest() for part in parts))
