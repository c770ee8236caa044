"""Against Soteria (Balunović et al. 2022): leave the protected layer out of the match; the others tell enough.

Which layer it is needs no secret: its weight gradient has columns of exact zeros. In batches, a first fully connected layer
that is not protected is read apart.
"""

from torch import Tensor

from gradveil.attacks import Target, attack
from gradveil.attacks.counters.batches import BatchCounter
from gradveil.attacks.matching.problem import Insight
from gradveil.core.observation import Observation
from gradveil.defenses.gradient.soteria import Soteria


@attack("soteria-drop", against=(Soteria,), targets="any", version=6)
class SoteriaDrop(BatchCounter):
    """Match all but the tensors with zeroed columns; in batches, read the first fully connected layer apart.

    Single images and all networks: the match. Batches: the reading, where the first fully connected layer
    meets a ReLU and is not protected itself, as with `layers=last` on networks with a hidden layer.

    Example: gradveil audit --defense soteria --attack soteria-drop
    """

    def applies(self, observation: Observation) -> str | None:
        return None if _protected(observation) else "no weight gradient has columns of exact zeros"

    def insight(self, target: Target) -> Insight:
        dropped = {name for o in target.observations for name in _protected(o)}
        return Insight(keep=[n for n in target.model.trainable if n not in dropped])


def _protected(observation: Observation) -> list[str]:
    return [name for name, t in observation.update.tensors.items() if t.ndim == 2 and _masked(t)]


def _masked(weight: Tensor) -> bool:
    """Some columns zero in every row, the others in hardly any: a mask over inputs, not a dead unit or plain pruning."""
    zero = weight == 0
    columns = zero.all(0)
    rest = zero[:, ~columns]
    return bool(columns.float().mean() > 0.005 and rest.numel() and rest.float().mean() < 0.5)
