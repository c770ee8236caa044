"""Protection in a plain training loop: `shield.backward(x, y)` in place of `loss.backward()`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.core.errors import UserError
from gradveil.core.gradients import Loss, Mode, ModelFunction, cross_entropy
from gradveil.core.types import Batch, LocalTraining
from gradveil.defenses import Defense, parse


class Shield:
    """Gives a model the protected gradient of each batch. `model` is the network to train, after the model stage.

    Data-stage defenses act once on every image: what an image became is remembered and used again.
    """

    def __init__(self, module: nn.Module, client: Client, defense: Defense):
        self.model, self.defense = module, defense
        self._client, self._known, self._round = client, dict[str, Batch](), 0

    def backward(self, x: Tensor, y: Tensor) -> None:
        """Put the protected gradient of the batch into `.grad` of the model's parameters (added, as torch does).

        `x` are pixels in [0, 1]; the mean and std given to `protect` are applied here.
        """
        state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        state = {name: t.detach() for name, t in state.items()}
        batch = Batch(x.detach(), y.detach())
        self._round += 1
        update, trace = self._client.round(state, batch, self._round, protected=self._protected(state, batch))
        for name, parameter in self.model.named_parameters():
            if name in update.tensors:
                found = update.tensors[name].to(parameter)
                parameter.grad = found if parameter.grad is None else parameter.grad + found
        self._track_statistics(trace.fed.x)

    def _protected(self, state: dict[str, Tensor], batch: Batch) -> Batch:
        if "data" not in self.defense.stages:
            return batch
        names = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in batch.x.cpu()]
        new = [i for i, name in enumerate(names) if name not in self._known]
        if new:
            found, _ = self._client.protect(state, batch[new], self._round)
            self._known.update((names[i], found[j : j + 1]) for j, i in enumerate(new))
        rows = [self._known[name] for name in names]
        return Batch(torch.cat([r.x for r in rows]), torch.cat([r.y for r in rows]))

    def _track_statistics(self, fed: Tensor) -> None:
        """BatchNorm's running statistics live in the model itself and are followed on what was really fed."""
        tracked = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if self.model.training and tracked and len(fed) > 1:
            with torch.no_grad():
                step = self._client
                self.model((fed - step.mean.view(-1, 1, 1)) / step.std.view(-1, 1, 1))


def protect(
    model: nn.Module,
    defense: str | Defense,
    data: Any = None,
    *,
    public: Any = None,
    num_classes: int | None = None,
    loss: Loss = cross_entropy,
    mean: Iterable[float] | None = None,
    std: Iterable[float] | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Shield:
    """A shield for a plain PyTorch loop.

    `data` is the client's training set ((x, y) tensors or a torch Dataset, pixels in [0, 1]); defenses that prepare
    themselves need it. Train `shield.model`: a model-stage defense changes the network.
    """
    found = parse(defense)
    private = as_batch(data)
    shape = tuple(private.x.shape[1:])
    module = found.model(model, shape)  # type: ignore[arg-type]
    mode: Mode = "train" if module.training else "eval"
    classes = num_classes or int(private.hard_labels.max()) + 1
    channels = shape[0]
    client = Client(
        ModelFunction(module, loss, mode),
        found,
        LocalTraining(),
        state={n: t.detach().clone() for n, t in module.state_dict().items()},
        private=private,
        public=None if public is None else as_batch(public),
        num_classes=classes,
        mean=torch.tensor(list(mean)) if mean is not None else torch.zeros(channels),
        std=torch.tensor(list(std)) if std is not None else torch.ones(channels),
        seed=seed,
        cache=cache,
    )
    return Shield(module, client, found)


def as_batch(data: Any) -> Batch:
    """(x, y) tensors, a `Batch`, or a torch Dataset of (image, label), as one batch."""
    if data is None:
        raise UserError("protect needs data=: the client's training set, which defenses prepare themselves on.")
    if isinstance(data, Batch):
        return data
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], Tensor):
        return Batch(data[0].float(), data[1])
    rows = [data[i] for i in range(len(data))]
    return Batch(
        torch.stack([torch.as_tensor(x, dtype=torch.float32) for x, _ in rows]),
        torch.as_tensor([int(y) for _, y in rows]),
    )
