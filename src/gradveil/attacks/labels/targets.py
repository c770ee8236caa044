"""Targets that are no classes.

Of a single image: the last layer gives its input a and the signal δ at its output exactly (see `analytic/apart.py`), so the
model's output is known: o = W a + b. The target y is one that gives the signal up to its size, which a defense may have
changed: ∂loss/∂o (o, y) ∝ δ. Targets of 0 and 1 are told exactly. Of other targets only the direction from the output is
known, which is enough to match an update; their distance is taken to be half a unit. Binary cross entropy and squared error
are linear in y, and one step of Newton is exact; other losses take a few.

Of a batch: the bias of the last layer is pulled by the sum of the signals, which tells how large each target is on average
if the pull at other images is known. All images then get the mean target: which of them has which is not told.
"""

import torch
from torch import Tensor
from torch.func import grad, jacrev

from gradveil.attacks.analytic.apart import layer_inputs
from gradveil.attacks.labels.beliefs import outputs, public_images, size_is_true
from gradveil.attacks.layers import classifier_gradients, classifier_name
from gradveil.core.errors import UserError
from gradveil.core.observation import Observation

_STEPS = 20
_EXACT = 1e-4  # of the signal, as a share


def infer_targets(observation: Observation) -> Tensor:
    """One row of numbers per image: exact for the clean gradient of one image, else their mean."""
    layer = classifier_name(observation)
    _, signal = classifier_gradients(observation)
    single = observation.knowledge.batch_size == 1 and observation.update.kind == "gradient"
    reading = layer_inputs(observation, layer) if single and layer and signal is not None else None
    if reading is None or not reading.is_exact or signal is None:
        return mean_targets(observation, signal).expand(observation.knowledge.batch_size, -1)
    state = observation.state
    output = state[f"{layer}.weight"].double() @ reading.inputs[0].double() + state[f"{layer}.bias"].double()
    target = _solve(observation, output, signal.double())
    if target is None:
        raise UserError("no targets explain this update under the loss given; is it the one the clients train with?")
    return target.float()[None]


def mean_targets(observation: Observation, signal: Tensor | None) -> Tensor:
    """By the signal at the last bias where its size is the true one, else those of public images, else halfway."""
    knowledge, public = observation.knowledge, public_images(observation)
    examples = public.y.float() if public is not None and public.y.ndim == 2 else torch.tensor([[0.0], [1.0]])
    usual = examples.mean(0).expand(observation.task.num_outputs)
    if signal is None or not size_is_true(observation):
        return usual
    believed = outputs(observation).double().requires_grad_()

    def pull(value: float) -> Tensor:
        with torch.enable_grad():
            loss = observation.model.loss_fn(believed, torch.full_like(believed, value))
        return torch.autograd.grad(loss, believed)[0].sum(0)

    at_zero, at_one = pull(0.0), pull(1.0)
    noise = knowledge.noise.std * knowledge.norm if knowledge.noise else 0.0
    told = (at_zero - signal.double() * knowledge.norm) / (at_zero - at_one)
    clear = told.isfinite() & ((at_zero - at_one).abs() > 4 * noise)
    return torch.where(clear, told.clamp(examples.min(), examples.max()).float(), usual)


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
