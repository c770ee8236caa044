"""Protection in a plain training loop: `shield.backward(x, y)` in place of `loss.backward()`."""

import hashlib
import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from gradveil.client import Client, prepare_client
from gradveil.core.errors import UserError, shape_text, unknown
from gradveil.core.gradients import Loss, ModelFunction, cross_entropy
from gradveil.core.local_training import LocalTraining
from gradveil.core.losses import NAMED
from gradveil.core.randomness import REPRODUCIBLE, Streams
from gradveil.core.task import Task
from gradveil.core.text import listing, plural, shorten
from gradveil.core.types import Batch, Shape, Tensors
from gradveil.data.readers.objects import read_object
from gradveil.data.validation import checked_batch, to_batch
from gradveil.defenses.base import Setup, checked_update, is_plain
from gradveil.protection.audited import Audited, AuditOptions, DefenseSource, options_of
from gradveil.protection.door import Door, DoorOptions


class Shield:
    """Gives a model the protected gradient of each batch. `model` is the network to train, after the model stage.

    Data-stage defenses act once on every image: the result is remembered and used again. Keep it over a restart with
    `state_dict` and `load_state_dict`: two encodings of one image give away more than one.
    """

    def __init__(self, module: nn.Module, client: Client, door: Door):
        self.model, self.defense = module, door.defense
        self._client, self._door, self._encoded, self._round = client, door, dict[bytes, Batch](), 0
        self._warned = False

    def backward(self, x: Tensor, y: Tensor) -> None:
        """Put the protected gradient of the batch into `.grad` of the model's parameters (added, as torch does).

        `x` are pixels in [0, 1]; the mean and std given to `protect` are applied here. Where the defense returns
        something that must not leave, no `.grad` changes.
        """
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        state = {name: tensor.detach().clone() for name, tensor in named}  # a defense must not reach the model itself
        batch = checked_batch(x, y, self._client.task, "the batch")
        self._warn_of_small(len(batch))
        self._round += 1
        parameters = {n: p for n, p in self.model.named_parameters() if n in self._client.task.model.trainable}
        with self._door.round(self._round):
            update, trace = self._client.round(state, batch, self._round, protected=self._protected(state, batch))
            protected = checked_update(parameters, update.tensors)
            sums = {n: t if (old := parameters[n].grad) is None else old + t for n, t in protected.items()}
            gradients = checked_update(parameters, sums)
            self._gradients_leave(protected)
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
        self._track_statistics(trace.fed.x)

    def _warn_of_small(self, images: int) -> None:
        """Once, where a gradient leaves that is of fewer images than those of the audit."""
        protection = self._door.audited.protection
        if protection and protection.units.kind == "gradient" and images < protection.images and not self._warned:
            self._warned = True
            text = "a batch of %s; the audit was with %d, and more of an image is in a smaller one"
            logging.getLogger("gradveil").warning(text, plural(images, "image"), protection.images)

    def _gradients_leave(self, gradients: Tensors) -> None:
        self._door.let_out(self._round, gradients, list(gradients))

    def state_dict(self) -> Tensors:
        """The images after the data stage: `hash` has one row per image (SHA-256 of its pixels), `x` and `y` likewise."""
        if not self._encoded:
            return {}
        rows = self._encoded.values()
        hashes = torch.stack([torch.frombuffer(bytearray(name), dtype=torch.uint8) for name in self._encoded])
        return {"hash": hashes, "x": torch.cat([b.x for b in rows]).cpu(), "y": torch.cat([b.y for b in rows]).cpu()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Use these encodings, of `state_dict`, for their images."""
        if not state:
            return
        if state.keys() != {"hash", "x", "y"} or not all(map(is_plain, state.values())):
            raise UserError("this is not the state of a shield: it has the tensors hash, x and y.")
        hashes, x, y = state["hash"], state["x"], state["y"]
        images = x.shape[1:] == self._client.task.input_shape and x.is_floating_point() and bool(torch.isfinite(x).all())
        rows = hashes.shape[:1] == x.shape[:1] == y.shape[:1] and hashes.shape[1:] == (32,) and hashes.dtype == torch.uint8
        if not (images and rows):
            raise UserError("this is not the state of a shield for these images: one hash, image and label per image.")
        names = [row.numpy().tobytes() for row in hashes.cpu()]
        self._encoded.update((name, Batch(x[i : i + 1], y[i : i + 1])) for i, name in enumerate(names))

    def _protected(self, state: Tensors, batch: Batch) -> Batch:
        if "data" not in self.defense.stages:
            return batch
        names = [hashlib.sha256(image.numpy().tobytes()).digest() for image in batch.x.cpu()]
        new = [i for i, name in enumerate(names) if name not in self._encoded]
        if new:
            encoded, _ = self._client.protect(state, batch[new], self._round)
            self._encoded.update((names[i], encoded[j : j + 1]) for j, i in enumerate(new))
        rows = [self._encoded[name] for name in names]
        return Batch(torch.cat([r.x for r in rows]).to(batch.x.device), torch.cat([r.y for r in rows]).to(batch.y.device))

    def _track_statistics(self, fed: Tensor) -> None:
        """BatchNorm's running statistics live in the model itself and are followed on what was really fed."""
        tracked = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if self.model.training and tracked and len(fed) > 1:
            with torch.no_grad():
                self.model(self._client.task.normalize(fed))


class TaskOptions(TypedDict, total=False):
    """What the model and the data do not say of the task."""

    num_classes: int  # the largest label plus one, if left out
    loss: Loss  # cross entropy, if left out
    mean: Iterable[float]  # one value per channel; 0, if left out
    std: Iterable[float]  # one value per channel; 1, if left out


class ShieldOptions(TaskOptions, AuditOptions, total=False):
    """The task, and how the shield lets gradients out."""

    deadline: float  # seconds that each call of the defense may take; later, nothing is sent
    evidence: str | Path  # a file that gets one line of JSON per call of `backward`


def protect(
    model: nn.Module,
    defense: DefenseSource,
    data: Any = None,
    *,
    public: Any = None,
    reproducible: int | None = None,
    cache: Path | None = None,
    **options: Unpack[ShieldOptions],
) -> Shield:
    """A shield for a plain PyTorch loop.

    `data` is the client's training set ((x, y) tensors or a torch Dataset, pixels in [0, 1]); defenses that prepare
    themselves need it. Train `shield.model`: a model-stage defense changes the network. Draws come from the operating
    system; `reproducible` is a seed in their place, for tests: everyone who knows it can undo the protection.
    `options` may give num_classes, loss, mean and std of the task, a `deadline` for the defense, and a file for `evidence`.

    `defense` may be an exported protection or the path of one, which gives the task. It acts on what was audited alone: a
    gradient per batch, or local steps as `training` and `images` state them, if the defense acts on no weight difference.
    """
    check_names(options, ShieldOptions.__annotations__)
    door, private = Door.of("shield", defense, options_of(DoorOptions, options)), as_batch(data)
    audited, module = door.audited, door.defense.model(model, private.image_shape)
    _check_loop(audited, len(private))
    if reproducible is not None:
        warnings.warn(REPRODUCIBLE, stacklevel=2)
    streams = Streams() if reproducible is None else Streams.of_seed(reproducible)
    task = audited_task(audited, options_of(TaskOptions, options), private.image_shape)
    if statistics := [n for n, b in module.named_buffers() if module.training and b.is_floating_point()]:
        text = "a shield protects gradients only; %d buffers follow the images, do not send them: %s"
        logging.getLogger("gradveil").warning(text, len(statistics), shorten(", ".join(statistics), 120))
    setup = setup_for(module, private, public, cache, task)
    audited.check_model(setup.model.mode, [t.shape for t in setup.model.parameters(setup.state).values()])
    return Shield(module, prepare_client(door.checked, LocalTraining(), setup, streams), door)


def _check_loop(audited: Audited, images: int) -> None:
    """Refuse what was audited on weight differences, unless only the steps before them are protected, as audited."""
    if audited.protection is None or (audited.protection.units.kind == "gradient" and audited.training is None):
        return
    if audited.protection.units.kind == "delta" and "update" in audited.defense.stages:
        audited.refuse(["a shield acts on the gradient of a batch, the audit was on weight differences"])
    audited.check_images(audited.client_training({}), audited.images or images)


def audited_task(audited: Audited, task: TaskOptions, input_shape: Shape) -> TaskOptions:
    """The task as audited where nothing else is stated. Another one is refused, unless that is wanted."""
    if audited.protection is None:
        return task
    expected = audited.protection.task
    if "loss" not in task and expected.loss not in NAMED:
        raise UserError(f"the audit was with the loss '{shorten(expected.loss, 80)}'; give it as loss=….")
    classes = task.get("num_classes", expected.num_outputs)
    mean, std = list(task.get("mean", expected.mean)), list(task.get("std", expected.std))
    different = [] if input_shape == expected.input_shape else [f"images of {shape_text(input_shape)}"]
    different += [] if classes == expected.num_outputs else [f"{classes} classes"]
    different += [] if _close(mean, expected.mean) and _close(std, expected.std) else ["another mean or std"]
    audited.refuse(different)
    return {"num_classes": classes, "mean": mean, "std": std, "loss": task["loss"] if "loss" in task else NAMED[expected.loss]}


def _close(values: Sequence[float], others: Sequence[float]) -> bool:
    return len(values) == len(others) and all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(values, others, strict=True))


def check_names(options: Mapping[str, object], names: Iterable[str]) -> None:
    """Refuse an option that does not exist: a typing error must not leave protection out."""
    for name in options:
        if name not in names:
            raise unknown("option", name, names, hint=f"There are {listing(sorted(names))}.")


def setup_for(module: nn.Module, private: Batch, public: Any, cache: Path | None, task: TaskOptions) -> Setup:
    """What a defense prepares itself on in real training. Networks that it trains may be known, its draws not."""
    channels = private.x.shape[1]
    function = ModelFunction(module, task.get("loss", cross_entropy), "train" if module.training else "eval")
    outputs = task.get("num_classes") or int(private.hard_labels.max()) + 1
    mean, std = (torch.tensor(list(v)) for v in (task.get("mean", [0.0] * channels), task.get("std", [1.0] * channels)))
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    others = None if public is None else as_batch(public)
    return Setup(Task(function, private.image_shape, outputs, mean, std), state, private, others, cache=cache)


def as_batch(data: Any) -> Batch:
    """(x, y), a `Batch`, or a torch Dataset of (image, label), as one batch, checked as the data of an audit is."""
    if data is None:
        raise UserError("protect needs data=: the client's training set, which defenses prepare themselves on.")
    source = (data.x, data.y) if isinstance(data, Batch) else data
    return to_batch(read_object(source, "data").train)
