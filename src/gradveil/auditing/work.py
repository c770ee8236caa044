"""One cell at work: what it may use."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from gradveil.attacks.base import Attack
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Limits
from gradveil.auditing.plan import Cell
from gradveil.core.progress import Steps
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Defense
from gradveil.storage.run_folder import StoredCell


class Store(Protocol):
    """What a cell may read: the cells that it needs, and networks that were trained before."""

    @property
    def cache(self) -> Path | None: ...
    def outcome(self, key: str, /) -> StoredCell: ...
    def tensors(self, key: str, /) -> Tensors: ...


@dataclass
class Work:
    """A cell and all that it may use."""

    cell: Cell
    case: Case
    folder: Store
    progress: Steps
    limits: Limits

    @property
    def defense(self) -> Defense:
        return self.case.defenses[self.cell.defense]

    @property
    def attack(self) -> Attack | None:
        return self.case.attack(self.cell.attack) if self.cell.attack else None

    @property
    def batches(self) -> list[Batch]:
        """The private images of every victim."""
        return [self.case.batch(v) for v in range(self.case.spec.victims)]

    def stage(self, _: str, done: int, total: int) -> None:
        """Progress of a defense or a training, without the name of its step."""
        self.progress(done, total)

    def needed(self, kind: str) -> Tensors | None:
        """The tensors of the needed cell of this kind."""
        key = next((key for key in self.cell.needs if self.folder.outcome(key).kind == kind), None)
        return None if key is None else self.folder.tensors(key)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: sums over several round differently, and one is the fastest for many small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
