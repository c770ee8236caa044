"""Targets that are no classes, from the gradient of a single image.

The last layer gives its input a and the signal δ at its output exactly (see `analytic/apart.py`), so the model's output
is known: o = W a + b. The target y is one that gives the signal up to its size, which a defense may have changed:
∂loss/∂o (o, y) ∝ δ. Targets of 0 and 1 are told exactly. Of other targets only the direction from the output is known,
which is enough to match an update; their distance is taken to be half a unit. Binary cross entropy and squared error are
linear in y, and one step of Newton is exact; other losses take a few.
"""

import torch
from torch import Tensor
from torch.func import grad, jacrev

from gradveil.attacks.analytic.apart import layer_inputs
from gradveil.attacks.layers import classifier_gradients, classifier_name
from gradveil.core.errors import UserError
from gradveil.core.observation import Observation

_STEPS = 20
_EXACT = 1e-4  # of the signal, as a share


def infer_targets(observation: Observation) -> Tensor:
    """The row of numbers behind the gradient of one image."""
    layer = classifier_name(observation)
    _, signal = classifier_gradients(observation)
    single = observation.knowledge.batch_size == 1 and observation.update.kind == "gradient"
    reading = layer_inputs(observation, layer) if single and layer and signal is not None else None
    if reading is None or not reading.is_exact or signal is None:
        raise UserError(
            "the targets cannot be told from this update (that takes the clean gradient of one image and a last layer with "
            "a bias); grant them with --knowledge paper."
        )
    state = observation.state
    output = state[f"{layer}.weight"].double() @ reading.inputs[0].double() + state[f"{layer}.bias"].double()
    target = _solve(observation, output, signal.double())
    if target is None:
        raise UserError("no targets explain this update under the loss given; is it the one the clients train with?")
    return target.float()[None]


def _solve(observation: Observation, output: Tensor, signal: Tensor) -> Tensor | None:
    def pull(y: Tensor) -> Tensor:
        pulled: Tensor = grad(lambda o: observation.model.loss_fn(o[None], y[None]))(output)
        return pulled

    zeros, ones = torch.zeros_like(output), torch.ones_like(output)
    direction, binary = signal / signal.norm(), torch.where(signal < 0, ones, zeros)
    with torch.enable_grad():
        pulled, unit = pull(binary), (pull(ones) - pull(zeros)).norm()
    if float((pulled / pulled.norm() - direction).norm()) <= _EXACT:
        return binary
    signal = direction * unit / 2
    y = torch.full_like(output, 0.5)
    for _ in range(_STEPS):
        with torch.enable_grad():
            away, slope = pull(y) - signal, jacrev(pull)(y)
        if not signal.any():
            return None
        if float(away.norm()) <= _EXACT * float(signal.norm()):
            return y
        step = torch.linalg.lstsq(slope.detach(), -away.detach()[:, None], driver="gelsd").solution[:, 0]
        y = y + step
        if not bool(y.isfinite().all()):
            return None
    return None
