"""Random streams: one per purpose, so that no draw depends on the order of work."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

REPRODUCIBLE = "the protection is reproducible: everyone who knows the seed can undo it."
_BEGIN, _WORDS = 24, 624  # where the Mersenne Twister's words lie in the state of a torch.Generator, and how many


def generator(*key: int | str) -> torch.Generator:
    """A random stream for (seed, victim, draw, purpose …). Equal keys give equal streams.

    For audits only: torch uses 32 bits of a seed, so that a stream can be found by trying. `Streams` cannot.
    """
    digest = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seed torch's global stream inside the block, for code that can use no other; restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator(*key).initial_seed())
        yield


@dataclass(frozen=True)
class Streams:
    """Random streams for protection. All 19,968 bits of a stream's state are hashed from a secret and the stream's key.

    `fresh` adds new randomness of the operating system to every stream: no two streams are alike, whatever their keys.
    """

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    fresh: bool = True

    @classmethod
    def of_seed(cls, seed: int) -> Streams:
        """Streams that everyone who knows the seed can repeat."""
        return cls(f"reproducible {seed}".encode(), fresh=False)

    def __call__(self, *key: int | str) -> torch.Generator:
        parts = [self.secret, *(str(k).encode() for k in key), secrets.token_bytes(32) if self.fresh else b""]
        hashed = hashlib.shake_256(b"".join(hashlib.sha256(part).digest() for part in parts))
        words = np.frombuffer(hashed.digest(4 * _WORDS), dtype=np.uint32).astype(np.int64)
        rng = torch.Generator().manual_seed(0)
        state = rng.get_state()
        state[_BEGIN : _BEGIN + 8 * _WORDS].view(torch.int64).copy_(torch.from_numpy(words))
        return rng.set_state(state)
