"""Soteria (Sun et al., CVPR 2021): prune the gradient of a fully connected layer where its input tells most.

The input r of the layer is a representation of the image X. An entry of r whose ‖∂r_i/∂X‖ is small against r_i is
easily traced back to X; the columns of the layer's weight gradient that belong to the `ratio` most traceable entries
are zeroed. Biases and all other tensors stay as they are, which is also the weakness: an attack may drop the layer.

The paper asks for the largest ‖r_i·(∇_X r_i)⁻¹‖; its code approximates it by the smallest ‖∂r_i/∂X‖ / (r_i + offset),
summed over the batch, and so does this file. The code takes the percentile of the signed scores but compares absolute
values with it; here both are absolute (the same for non-negative features). The code protects one layer, by default the
last; `layers=all` masks every fully connected layer, so that no single one can be left out.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses.base import Defense, Step
from gradveil.defenses.registry import defense

_CHUNK = 2**24  # entries of the Jacobian held at once


@defense("soteria", counters=["soteria-drop"])
@settings
class Soteria(Defense):
    """Zero the weight-gradient columns of the most traceable entries of a linear layer's input."""

    ratio: float = Field(default=0.5, ge=0, le=1)  # published runs: 0.01 against DLG, 0.4 to 0.6 against IG
    layers: Literal["last", "all"] = "last"
    offset: float = Field(default=0.1, gt=0)  # code against IG; 1e-10 stands for none, as in GGL's variant

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        tensors = dict(tensors)
        for name, score in self.scores(step).items():
            mask = (score >= torch.quantile(score, self.ratio)).to(tensors[name])
            tensors[name] = tensors[name] * mask
            step.secrets[f"soteria.{name}"] = mask
        return tensors

    def scores(self, step: Step) -> Tensors:
        """For each protected weight, by its name, a score for every column; the lowest are the most traceable."""
        x = step.task.normalize(step.batch.x).detach().requires_grad_()
        with torch.enable_grad():
            inputs = _linear_inputs(step, x)
            if self.layers == "last":
                inputs = dict([list(inputs.items())[-1]])
            return {name: self._score(r, x) for name, r in inputs.items()}

    def _score(self, r: Tensor, x: Tensor) -> Tensor:
        flat = r.flatten(1)  # tokens, where a layer sees several of an image, count like images
        size = max(1, _CHUNK // x.numel())
        norms = []
        for rows in torch.eye(flat.shape[1], dtype=r.dtype, device=r.device).split(size):
            # images do not depend on each other, so one backward pass of the sum serves the whole batch
            cotangents = rows[:, None].expand(-1, len(flat), -1)
            (jacobian,) = torch.autograd.grad(flat, x, cotangents, retain_graph=True, is_grads_batched=True)
            norms.append(jacobian.flatten(2).norm(dim=2))
        score = torch.cat(norms).T / (flat.detach() + self.offset)
        return score.reshape(-1, r.shape[-1]).sum(0).abs()


def _linear_inputs(step: Step, x: Tensor) -> Tensors:
    """The inputs of the trained linear layers by the name of their weight, in the order in which they run."""
    inputs: Tensors = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs.pop(name, None)
            inputs[name] = given[0]

        return hook

    linear = [(path, m) for path, m in step.model.module.named_modules() if isinstance(m, nn.Linear)]
    named = [(f"{path}.weight" if path else "weight", m) for path, m in linear]
    hooks = [m.register_forward_pre_hook(note(name)) for name, m in named if name in step.model.trainable]
    try:
        step.model(step.state, x, step.noise)
    finally:
        for hook in hooks:
            hook.remove()
    if not inputs:
        raise UserError("soteria protects a fully connected layer, and this model has none that is trained.")
    return inputs
