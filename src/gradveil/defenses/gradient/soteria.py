"""Soteria: prune the gradient of a fully connected layer where its input reveals the image most."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.layers import layer_inputs
from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses import Defense, Step, defense

_CHUNK = 2**20  # entries of the Jacobian held at once; more leave the cache and take longer


@defense("soteria")
@settings
class Soteria(Defense):
    """Set the weight-gradient columns of the most traceable inputs of a linear layer to zero.

    Sun et al., CVPR 2021. The input r of the layer represents the image X. An entry r_i whose ‖∂r_i/∂X‖ is small
    compared with r_i is easily traced back to X; the columns of the weight gradient that belong to the most traceable
    entries become zero. Biases and all other tensors stay unchanged, so an attack may ignore this layer.

    The paper asks for the largest ‖r_i·(∇_X r_i)⁻¹‖. Its code approximates it by the smallest ‖∂r_i/∂X‖ / (r_i + offset),
    summed over the batch, and so does this class. The code takes the percentile of the signed scores but compares
    absolute values with it; here both are absolute (equal for non-negative features).

    Args:
        ratio: share of columns that become zero. Published runs: 0.01 against DLG, 0.4 to 0.6 against IG.
        layers: `last` protects the last linear layer, as the code does by default; `all` protects every linear layer.
        offset: 0.1 in the code against IG; 1e-10 stands for none, as in the variant of GGL.

    Example:
        >>> gv.protect(model, "soteria:ratio=0.4", data=(x, y))
    """

    ratio: float = Field(default=0.5, ge=0, le=1)
    layers: Literal["last", "all"] = "last"
    offset: float = Field(default=0.1, gt=0)

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        tensors = dict(tensors)
        for name, score in self.scores(step).items():
            mask = (score >= torch.quantile(score, self.ratio)).to(tensors[name])
            tensors[name] = tensors[name] * mask
            step.secrets[f"soteria.{name}"] = mask
        return tensors

    def scores(self, step: Step) -> Tensors:
        """One score per column of each protected weight, by its name; the lowest are the most traceable."""
        x = step.task.normalize(step.batch.x).detach().requires_grad_()
        with torch.enable_grad():
            inputs = _linear_inputs(step, x)
            if self.layers == "last":
                inputs = dict([list(inputs.items())[-1]])
            return {name: self._score(r, x) for name, r in inputs.items()}

    def _score(self, r: Tensor, x: Tensor) -> Tensor:
        flat = r.flatten(1)  # where an image has several tokens, a token counts like an image
        size = max(1, _CHUNK // x.numel())
        norms = []
        for rows in torch.eye(flat.shape[1], dtype=r.dtype, device=r.device).split(size):
            # images do not depend on each other, so one backward pass of the sum is enough for the batch
            cotangents = rows[:, None].expand(-1, len(flat), -1)
            (jacobian,) = torch.autograd.grad(flat, x, cotangents, retain_graph=True, is_grads_batched=True)
            norms.append(jacobian.flatten(2).norm(dim=2))
        score = torch.cat(norms).T / (flat.detach() + self.offset)
        return score.reshape(-1, r.shape[-1]).sum(0).abs()


def _linear_inputs(step: Step, x: Tensor) -> Tensors:
    """The inputs of the trained linear layers by the name of their weight, in the order in which they run."""
    linear = [(path, m) for path, m in step.model.module.named_modules() if isinstance(m, nn.Linear)]
    named = {f"{path}.weight" if path else "weight": m for path, m in linear}
    trained = {name: m for name, m in named.items() if name in step.model.trainable}
    inputs = layer_inputs(trained, lambda: step.model(step.state, x, step.noise))
    if not inputs:
        raise UserError("soteria protects a fully connected layer, and this model has none that is trained.")
    return inputs
