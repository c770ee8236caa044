"""Attacks on another device with the code that runs on a CPU.

Random numbers are drawn on the CPU, so that the starts are the same everywhere, and then moved; every other new tensor
is made on the device.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from gradveil.core.gradients import ModelFunction
from gradveil.core.observation import Knowledge, Observation, Reconstruction, Sighting
from gradveil.core.types import Batch, Tensors


class OnDevice(TorchFunctionMode):
    """While it lasts, new tensors are on the device unless somebody says where."""

    def __init__(self, device: torch.device):
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func not in _device_constructors() or options.get("device") is not None:
            return func(*args, **options)
        random = options.get("generator")
        if random is not None and random.device != self.device:
            return func(*args, **options).to(self.device)
        return func(*args, **{**options, "device": self.device})


def moved(observations: Sequence[Observation], device: torch.device) -> list[Observation]:
    """The observations with all their tensors on the device; those that share a model or a state still do."""
    models: dict[int, ModelFunction] = {}
    states: dict[int, Tensors] = {}

    def there(tensors: Mapping[str, Tensor]) -> Tensors:
        return {name: t.to(device) for name, t in tensors.items()}

    def sighting(seen: Sighting) -> Sighting:
        state = states.setdefault(id(seen.state), there(seen.state))
        update = replace(seen.update, tensors=there(seen.update.tensors), others=there(seen.update.others))
        return Sighting(state, update, seen.group)

    def knowledge_there(k: Knowledge) -> Knowledge:
        public = None if k.public is None else Batch(k.public.x.to(device), k.public.y.to(device))
        labels = None if k.labels is None else k.labels.to(device)
        return replace(k, public=public, labels=labels, secrets=there(k.secrets))

    moved_observations = []
    for o in observations:
        if id(o.model) not in models:
            models[id(o.model)] = copy.copy(o.model)
            models[id(o.model)].module = copy.deepcopy(o.model.module).to(device)
        task, seen = o.task.to(device, models[id(o.model)]), tuple(sighting(s) for s in o.seen)
        moved_observations.append(Observation(task, seen, knowledge_there(o.knowledge)))
    return moved_observations


def returned(answers: Sequence[Reconstruction]) -> list[Reconstruction]:
    """The answers with their tensors on the CPU."""
    return [replace(r, images=r.images.cpu(), labels=None if r.labels is None else r.labels.cpu()) for r in answers]
