"""What an audit may use: memory and a device."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field

from gradveil.core.errors import UserError
from gradveil.core.settings import settings

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Limits:
    """What a cell may use. A second try, after memory ran out, computes half as many rows at once."""

    memory: int | None = None  # bytes that one batched computation may take
    device: torch.device = CPU
    second_try: bool = False


NO_LIMITS = Limits()


@settings
class Execution:
    """Where an audit is computed and stored; `memory` is for batched computations of all workers together."""

    out: Path | None = Field(default=None, description="Folder; the same command resumes. [runs/…]")
    workers: int | None = Field(default=None, ge=0, description="Processes; 0: this one alone. [one per core]")
    memory: int | str | None = Field(default=None, description="For batched computations, e.g. 4G. [most of it]")
    device: str = Field(default="cpu", description="cpu, cuda, cuda:1 or mps.")
    ray: str | None = Field(default=None, description="Address of a Ray cluster that computes, or auto.")

    minutes: float | None = Field(default=None, gt=0, description="Choose victims, attacks and budget that fit in so many.")

    def __post_init__(self) -> None:
        find_device(self.device)
        parse_size("1M" if self.memory is None else self.memory)

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_size(self.memory)


_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SHARE = 0.6  # of the machine's memory: the rest is for the models, the data and other programs
_LEAST = 2**20
_CGROUPS = ("memory.max", "memory/memory.limit_in_bytes")  # version 2, version 1


def parse_size(text: str | int) -> int:
    """`4G`, `512M` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(text).strip().lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < _LEAST:
        raise UserError(f"--memory '{text}' is not a size of at least 1M; write for instance 4G or 512M.")
    return size


def machine_memory() -> int:
    """Bytes that this process may have at most: the machine's, or what its container is allowed."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8 * 2**30
    for name in _CGROUPS:
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            size = min(size, int((Path("/sys/fs/cgroup") / name).read_text()))
    return size


def share_of_memory(total: int | None, workers: int) -> int:
    """Bytes that one worker's batched computation may take."""
    return int(total if total is not None else _SHARE * machine_memory()) // max(1, workers)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused; on a CPU torch says so only in the message."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def find_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device '{name}' is no device; write cpu, cuda, cuda:1 or mps.") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type not in ("cuda", "mps"):
        raise UserError(f"--device '{name}': attacks run on cpu, cuda or mps.")
    count = torch.cuda.device_count() if device.type == "cuda" else int(torch.backends.mps.is_available())
    if (device.index or 0) >= count:
        raise UserError(f"--device '{name}': torch {torch.__version__} finds {count} such devices here.")
    return device
