"""Where noise and pruning act: on the gradient of every local step, as papers do, or once on what is sent, as users do."""

from typing import Literal

from gradveil.core.types import Tensors
from gradveil.defenses import Defense, Step

Place = Literal["update", "gradient"]


class AtOnePlace(Defense):
    """A defense that changes tensors by `act`, at the place that its setting `at` names."""

    at: Place

    def act(self, tensors: Tensors, step: Step) -> Tensors:
        raise NotImplementedError

    def changes(self, stage: str) -> bool:
        return stage == self.at

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        return self.act(tensors, step) if self.at == "gradient" else tensors

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return self.act(tensors, step) if self.at == "update" else tensors
