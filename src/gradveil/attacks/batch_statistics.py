"""The moments of a client's batch from the running statistics that it sends, by arithmetic.

With momentum m, BatchNorm replaces its running statistics r by (1 − m)·r + m·M after each mini-batch, where M are the mean and
the unbiased variance of the layer's inputs. The server has r from before and after. After one mini-batch that is M itself;
after several it is the mean of theirs, in which a later one weighs more. Secure aggregation shows the mean over clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.core.local_training import Moments
from gradveil.core.observation import Observation


def shares(momentum: float | None, mini_batches: int) -> Tensor:
    """What each mini-batch weighs in the moments that were sent, in their order; the weights add up to 1."""
    if momentum is None:  # running statistics are a plain average
        return torch.full((mini_batches,), 1 / mini_batches)
    weights = (1 - momentum) ** torch.arange(mini_batches - 1, -1, -1.0)
    return weights / weights.sum()


def sent_moments(observation: Observation) -> dict[str, Moments]:
    """Of each BatchNorm layer whose statistics were sent, by its path: the mean of the mini-batches' moments (see `shares`)."""
    state, sent = observation.state, observation.update.others
    steps = observation.knowledge.training.number_of_mini_batches(observation.knowledge.batch_size)
    moments = {}
    for path, momentum in observation.model.momenta.items():
        names = [f"{path}{name}" for name in ("running_mean", "running_var")]
        if all(name in sent and sent[name].shape == state[name].shape and sent[name].isfinite().all() for name in names):
            if momentum is None:
                before = float(state[f"{path}num_batches_tracked"])
                kept = before / (before + steps)
            else:
                kept = (1 - momentum) ** steps
            if kept == 1:  # statistics that never move
                continue
            mean, variance = ((sent[n].double() - kept * state[n].double()) / (1 - kept) for n in names)
            moments[path] = Moments(path, momentum, mean.to(state[names[0]]), variance.clamp_min(0).to(state[names[1]]))
    return moments
