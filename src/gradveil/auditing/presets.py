"""Audits of real federations: what their clients do, on data and nets that are small enough for two cores.

A preset gives settings of an audit; every option replaces one of them. Faithful are the mode, the optimiser, the
mini-batches, the epochs, the norm layers and what is sent; smaller than in reality are widths and numbers of images.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gradveil.core.errors import unknown


@dataclass(frozen=True)
class RealFederation:
    """A real federation."""

    description: str
    source: str  # where its settings are published, and what is smaller here
    settings: Mapping[str, object]


PRESETS: dict[str, RealFederation] = {
    "flower-quickstart": RealFederation(
        "Flower's first example: a small CNN on photographs, SGD with momentum, weight differences",
        "flwr new, template PyTorch: batches of 32, 1–2 epochs, momentum 0.9. Here 8 images per client in mini-batches of 4.",
        {
            **{"data": "cifar10", "model": "flower-cnn", "batch_size": 8, "local_batch_size": 4, "local_epochs": 2},
            **{"local_optimizer": "sgd:momentum=0.9", "local_lr": 0.01, "victims": 8},
        },
    ),
    "medical-resnet": RealFederation(
        "hospitals: ResNet18 with BatchNorm on 64×64 scans, 2 epochs, BatchNorm's statistics sent too",
        "Hatamizadeh et al. 2022 (arXiv 2202.06924): batch 8, ResNet18, FedAvg. Here 8 images per client, width 4 of 64.",
        {
            **{"data": "mednist", "model": "resnet18:width=4", "batch_size": 8, "local_batch_size": 8, "local_epochs": 2},
            **{"local_optimizer": "sgd:momentum=0.9", "local_lr": 0.01, "sends_statistics": True, "victims": 4},
        },
    ),
    "frozen-backbone": RealFederation(
        "only the classifier is trained, on the features of a frozen network",
        "Flower's example of finetuning a ViT (head only, batch 32, Adam). Here ResNet20 of width 8, 8 images per client.",
        {
            **{"data": "cifar10", "model": "resnet20:width=8", "batch_size": 8, "local_batch_size": 8},
            **{"frozen": ("conv1.*", "bn1.*", "layer*"), "local_optimizer": "adam", "local_lr": 0.001, "victims": 8},
        },
    ),
    "vit-finetune": RealFederation(
        "a whole vision transformer is fine-tuned by SGD with momentum, weight differences",
        "Dosovitskiy et al. 2021 (arXiv 2010.11929): fine-tuning by SGD, momentum 0.9, rates from 0.001 to 0.03 on CIFAR, "
        "batches of 512. Here a narrow `vit` without pretraining, 4 images per client in mini-batches of 2.",
        {
            **{"data": "cifar10", "model": "vit:patch=8", "batch_size": 4, "local_batch_size": 2},
            **{"local_optimizer": "sgd:momentum=0.9", "local_lr": 0.01, "victims": 4},
        },
    ),
    "chest-labels": RealFederation(
        "a classifier with several labels per scan, trained with Adam",
        "CheXpert-like clients (Irvin et al. 2019: batch 16, Adam at 1e-4, binary cross entropy). "
        "Here scans of MedNIST with the labels that follow from their class, 8 images per client, a narrow ResNet20.",
        {
            **{"data": "gradveil.data.medical:mednist_labels", "loss": "multi-label", "model": "resnet20:width=4"},
            **{"batch_size": 8, "local_batch_size": 8, "local_optimizer": "adam", "local_lr": 0.0001, "victims": 8},
        },
    ),
    "small-clients": RealFederation(
        "very many clients with a few images each: handwriting, dropout, one epoch of SGD",
        "Reddi et al. 2021 (arXiv 2003.00295): EMNIST, batches of 20, 1 epoch, SGD at 0.1. Here MNIST, 10 images per client.",
        {
            **{"data": "mnist-5k", "model": "femnist-cnn", "batch_size": 10, "local_batch_size": 5, "local_lr": 0.1},
            **{"victims": 8},
        },
    ),
    "groupnorm-adam": RealFederation(
        "a residual net with GroupNorm, trained with Adam",
        "Hsieh et al. 2020 (arXiv 1910.00189): GroupNorm in place of BatchNorm. Here ResNet18 of width 4, 8 images per client.",
        {
            **{"data": "cifar10", "model": "resnet18:width=4,norm=group", "batch_size": 8, "local_batch_size": 4},
            **{"local_optimizer": "adam", "local_lr": 0.001, "victims": 8},
        },
    ),
}


def preset(name: str) -> Mapping[str, object]:
    """The settings of a preset."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS, hint="`gradveil list presets` shows all.")
    return PRESETS[name].settings
