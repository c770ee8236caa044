"""What any PyTorch user would write: the reference that every description of local training is compared with."""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.core.gradients import Loss
from gradveil.core.local_training import LocalTraining
from gradveil.core.types import Tensors

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "sgd:momentum=0.9": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "sgd:weight_decay=0.1": lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.1),
    "sgd:momentum=0.9,nesterov=true,weight_decay=0.01": lambda p, lr: torch.optim.SGD(
        p, lr, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": torch.optim.Adam,
    "adam:beta1=0.8,eps=0.001,weight_decay=0.1": lambda p, lr: torch.optim.Adam(
        p, lr, betas=(0.8, 0.999), eps=1e-3, weight_decay=0.1
    ),
    "adamw": torch.optim.AdamW,
}


def trained(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    training: LocalTraining,
    orders: Sequence[Tensor] | None = None,
    loss: Loss = F.cross_entropy,
) -> nn.Module:
    """A copy of the module after a round on normalized images, or with the gradient in `.grad` where there is no lr.

    `orders` holds the images of each epoch in the order in which they are taken; without it, as they come.
    """
    module = copy.deepcopy(module).train(training.mode == "train")
    if training.lr is None:
        loss(module(x), y).backward()
        return module
    optimizer = OPTIMIZERS[training.optimizer]([p for p in module.parameters() if p.requires_grad], training.lr)
    size, waiting = training.batch_size or len(x), []
    batches = [part for e in range(training.epochs) for part in (orders[e] if orders else torch.arange(len(x))).split(size)]
    for number, part in enumerate(batches, start=1):
        waiting.append(part)
        if len(waiting) == training.accumulate or number == len(batches):
            optimizer.zero_grad()
            for rows in waiting:
                (loss(module(x[rows]), y[rows]) / len(waiting)).backward()
            optimizer.step()
            waiting = []
    return module


def sent(module: nn.Module, x: Tensor, y: Tensor, training: LocalTraining, orders: Sequence[Tensor] | None = None) -> Tensors:
    """The gradient or the weight difference of the round."""
    return difference(module, trained(module, x, y, training, orders), training)


def difference(module: nn.Module, after: nn.Module, training: LocalTraining) -> Tensors:
    """What a client sends that got `module` and made `after` of it."""
    named = {n: p for n, p in after.named_parameters() if p.requires_grad}
    if training.lr is None:
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    start = dict(module.named_parameters())
    return {n: (p - start[n]).detach() for n, p in named.items()}
