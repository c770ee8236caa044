"""What the model gives out for images that the adversary has."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Batch
from gradveil.defenses.gradient.dpsgd import DpSgd


def public_images(observation: Observation) -> Batch | None:
    """Public images of the right shape, at most 512."""
    public = observation.knowledge.public
    fits = public is not None and public.x.shape[1:] == torch.Size(observation.task.input_shape)
    return public[torch.arange(min(512, len(public)))] if public is not None and fits else None


class _Believed(NamedTuple):
    """Outputs, and the objects that they were computed from."""

    sources: tuple[object, ...]
    outputs: Tensor


_last: list[_Believed] = []  # at most one: the victims of an audit share a model and its state


def outputs(observation: Observation) -> Tensor:
    """The model's outputs (images × outputs), of public images where there are any, else of noise."""
    task, public = observation.task, observation.knowledge.public
    sources = (task.model, task.mean, task.std, observation.state, public)
    if not (_last and all(now is then for now, then in zip(sources, _last[0].sources, strict=True))):
        _last[:] = [_Believed(sources, _computed(observation))]
    return _last[0].outputs.clone()


def _computed(observation: Observation) -> Tensor:
    public, rng = public_images(observation), generator("belief")
    if public is not None:
        x = observation.task.normalize(public.x)
    else:
        x = torch.randn((128, *observation.task.input_shape), generator=rng)
    with torch.no_grad():
        result: Tensor = observation.model(observation.state, x, observation.model.draw_noise(len(x), rng))
    return result


def size_is_true(observation: Observation) -> bool:
    """Whether the gradient has the size that was computed: it is one, and was neither clipped nor lengthened."""
    clip, dpsgd = observation.knowledge.clip_norm, observation.knowledge.part(DpSgd)
    is_whole = clip is None or clip >= 1.01  # the update has length 1
    return observation.update.kind == "gradient" and is_whole and (dpsgd is None or dpsgd.gain == 1)
