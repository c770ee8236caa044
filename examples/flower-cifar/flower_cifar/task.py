"""What client and server share: the network of Flower's PyTorch tutorial, the images, training and testing."""

from __future__ import annotations

import os
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.types import Batch
from gradveil.data import DataSet, load
from gradveil.data.catalogue import NAMED_SETS
from gradveil.federation.partition import share

CHOICE = "FLOWER_CIFAR_DATA"  # the variable that names other data
OPTIMIZER = "sgd:momentum=0.9"  # of the clients, as gradveil writes it


class Net(nn.Module):
    """Two 5×5 convolutions with max-pooling, then layers of 120, 84 and one unit per class."""

    def __init__(self, input_shape: tuple[int, int, int] = (3, 32, 32), num_classes: int = 10):
        super().__init__()
        channels, side = input_shape[0], ((input_shape[1] - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


@lru_cache
def dataset() -> DataSet:
    """CIFAR-10, or the data that the variable FLOWER_CIFAR_DATA names; never one in the place of the other."""
    source = os.environ.get(CHOICE) or "cifar10:private=5000"
    if source.startswith("cifar10") and not NAMED_SETS["cifar10"].available():
        raise UserError(
            "this example uses CIFAR-10, which is not here: put its files into cifar10/ in the folder that GRADVEIL_DATA "
            f"names, or choose 5,000 embedded digits with --data mnist-5k ({CHOICE}=mnist-5k for `flwr run`)."
        )
    return load(source)


def choose_data(source: str | None) -> None:
    """Choose the data for this process and those that it starts, and say which it is; the program ends where it is not here."""
    if source:
        os.environ[CHOICE] = source
    try:
        print(about_data(), flush=True)
    except UserError as error:
        raise SystemExit(str(error)) from None


def about_data() -> str:
    data = dataset()
    return f"data: {data.name}, {len(data.private):,} private images"


def network() -> Net:
    """The same first weights for everyone who asks."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Net(dataset().input_shape, dataset().num_classes)


def images_of(client: int, clients: int, images: int) -> Batch:
    data = dataset()
    mine = share(data.private.hard_labels, clients, "iid", seed=0)[client][:images]
    return data.private[mine]


def normalize(x: Tensor) -> Tensor:
    data = dataset()
    return (x - data.mean.view(-1, 1, 1)) / data.std.view(-1, 1, 1)


def train(net: nn.Module, batch: Batch, *, epochs: int, batch_size: int, lr: float) -> float:
    """SGD with momentum; the mean loss."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for rows in torch.randperm(len(batch)).split(batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(normalize(batch.x[rows])), batch.y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net: nn.Module, batch: Batch) -> tuple[float, float]:
    """Loss and accuracy."""
    net.eval()
    with torch.no_grad():
        scores = torch.cat([net(normalize(x)) for x in batch.x.split(256)])
    right = scores.argmax(dim=1) == batch.y
    return F.cross_entropy(scores, batch.y).item(), right.double().mean().item()
