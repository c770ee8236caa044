"""The line-up of an audit: who stands in it, and what the ranks of the victims say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.lineup import Candidates
from gradveil.auditing.case import Case
from gradveil.certification.certificate import COUPLED, Certificate
from gradveil.certification.line_up import LineUpRisk
from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining
from gradveil.core.randomness import generator
from gradveil.core.types import Batch
from gradveil.defenses.base import Defense
from gradveil.metrics import identification_rate
from gradveil.protection.promise import certify
from gradveil.storage.run_folder import StoredCell

FEW = 10  # other private images of a class; with fewer, the candidates are of all classes


class Drawn(NamedTuple):
    """One line-up per batch: the candidates, and where the image of the batch stands, which no attack is told."""

    candidates: Candidates
    places: list[int]


def draw_line_ups(case: Case) -> Drawn:
    """Of each batch one image, among other private images of its class.

    Victims and other private images are one random draw, alike in whether the model was trained on them. So chance is
    exactly one in the number of candidates. Images of the same batch and copies of the victim do not stand beside it.
    """
    private, classes, rng = case.data.private, case.private_labels, generator(case.spec.seed, "line-up")
    shuffled, wanted = torch.randperm(len(private), generator=rng), case.spec.candidates - 1
    rows, places = list[Tensor](), list[int]()
    for batch in case.victims:
        victim = batch[torch.randint(len(batch), (), generator=rng)]
        others = shuffled[~torch.isin(shuffled, batch)]
        same = _different(private, others[classes[others] == classes[victim]], victim)
        chosen = (same if len(same) >= FEW else _different(private, others, victim))[:wanted]
        place = int(torch.randint(len(chosen) + 1, (), generator=rng))
        rows.append(torch.cat([chosen[:place], victim[None], chosen[place:]]))
        places.append(place)
    return Drawn(Candidates(private, tuple(rows)), places)


def _different(private: Batch, places: Tensor, victim: Tensor) -> Tensor:
    """The places of images that are no copies of the victim."""
    return places[~(private.x[places] == private.x[victim]).flatten(1).all(dim=1)]


def ranks(scores: Sequence[Tensor], places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Per victim its rank and the number of candidates. 1 is the first; of candidates that fit alike the victim is last."""
    return tuple((int((s >= s[place]).sum()), len(s)) for s, place in zip(scores, places, strict=True))


def line_up_risk(case: Case, defense: Defense, cells: Sequence[StoredCell]) -> LineUpRisk | None:
    """What the line-up of one defense showed; None where it did not run."""
    done = [cell for cell in cells if cell.status == "ok"]
    if not done:
        return None
    (cell,) = done
    if len(cell.ranks) != case.spec.victims:
        raise UserError(f"cell {cell.key} does not hold the line-up of this audit; delete it and resume the audit.")
    order, candidates = zip(*cell.ranks, strict=True)
    m, first = min(candidates), torch.tensor([rank == 1 for rank in order])
    rate = identification_rate(first, sum(1 / count for count in candidates) / len(candidates), len(first))
    return LineUpRisk(m=m, identified=rate, ranks=order, certificate=_certificate(case, defense, m))


def _certificate(case: Case, defense: Defense, m: int) -> Certificate | None:
    """The limit that the defense proves for what this audit saw; None where it proves none."""
    try:
        return proved_limit(case, defense, m, Repeated(case.training, case.spec.updates)) if m >= 2 else None
    except UserError:  # it has no proof, or no noise
        return None


@dataclass(frozen=True)
class Repeated:
    """Rounds of local training that the same image takes part in."""

    training: LocalTraining
    rounds: int
    images: int | None = None  # of every client; None: they have different numbers

    def releases(self) -> dict[str, Any]:
        """As certificates count them."""
        counted: dict[str, Any] = {"rounds": self.rounds, "local_epochs": self.training.epochs}
        size = self.training.batch_size
        if size is None or (self.images is not None and size >= self.images and self.training.sampling == "shuffled"):
            return {**counted, "sampling": "full"}
        if self.training.sampling == "shuffled":
            return {**counted, "sampling": "shuffled"}
        if self.images is None:
            raise UserError("nothing is promised for Poisson batches of clients with different numbers of images.")
        return {**counted, "sampling": "poisson", "batch_size": min(size, self.images), "images": self.images}


def proved_limit(case: Case, defense: Defense, m: int, repeated: Repeated, risk: float | None = None) -> Certificate:
    """The limit that the defense proves for so many rounds; with `risk`, at the noise for it."""
    task, _ = case.task(defense)
    if task.model.couples_images:
        raise UserError(f"{defense.spec} promises nothing here: {COUPLED}")
    if case.training.sends_statistics:
        raise UserError(f"{defense.spec} promises nothing here: statistics leave the client without noise.")
    releases = repeated.releases()

    def limit(clients: int) -> Certificate:
        return certify(defense, line_up=m, aggregate=clients, risk=risk, **releases)

    if case.spec.aggregate == 1:
        return limit(1)
    try:
        return limit(case.spec.aggregate)
    except UserError:  # where noise of clients does not add up, that of one still holds for the sum
        return limit(1)
