"""What an update captured elsewhere gives away. No truth is needed, and none is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil import attacks as attack_methods
from gradveil import models
from gradveil.attacks.base import Attack, Budget
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.losses import DEFAULT, find_loss, takes_classes
from gradveil.core.observation import Observation, Reconstruction, Sighting, observe
from gradveil.core.task import Task
from gradveil.core.types import Level, LocalTraining, Tensors, Update
from gradveil.storage.files import write_atomic, write_json, write_tensors
from gradveil.storage.updates import difference, fit_to_model, load_tensors, load_update

_MOST_IMAGES = 4096  # behind one update: more could be neither held nor told apart


@dataclass
class Rebuilt:
    """The reconstructions of one update, by attack; those that do not apply with the reason."""

    by_attack: dict[str, Reconstruction] = field(default_factory=dict)
    not_applicable: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The attack whose images fit the update best, by one common measure of the adversary."""
        return min(self.by_attack, key=lambda name: self.fit[name])

    fit: dict[str, float] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """As a notebook shows it: the best fit first."""
        from gradveil.core.notebook import figure

        order = sorted(self.by_attack, key=lambda name: self.fit[name])
        shown = [(name, self.by_attack[name].images, f"{100 * self.fit[name] ** 0.5:.2g}%") for name in order]
        return "".join(figure(images, f"{name}: differs by {fit} of the update") for name, images, fit in shown)

    def save(self, folder: str | Path) -> Path:
        """`FOLDER/ATTACK.safetensors` and `.png` for each attack, and `attack.json`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts: dict[str, Any] = {"best": self.best, "not_applicable": self.not_applicable, "attacks": []}
        for spec, found in self.by_attack.items():
            stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in spec)
            write_tensors(folder / f"{stem}.safetensors", {"images": found.images})
            write_atomic(folder / f"{stem}.png", _drawer(found.images))
            labels = None if found.labels is None else found.labels.tolist()
            fit = self.fit[spec] if torch.isfinite(torch.tensor(self.fit[spec])) else None
            row = {"spec": spec, "fit": fit, "labels": labels, "seconds": found.seconds, "failed": found.failed}
            facts["attacks"].append(
                {**row, "iterations": found.iterations, "files": [f"{stem}.safetensors", f"{stem}.png"]}
            )
        write_json(folder / "attack.json", facts)
        return folder


def attack_update(
    update: str | Path | Update | None = None,
    model: str | nn.Module | Callable[..., nn.Module] = "lenet",
    input_shape: Sequence[int] | None = None,
    attacks: Sequence[str | Attack] = ("linear", "rgap", "swift"),
    *,
    loss: str | Callable[..., Any] = DEFAULT,
    num_classes: int | None = None,
    batch_size: int | None = None,
    mean: Iterable[float] | None = None,
    std: Iterable[float] | None = None,
    labels: Sequence[int] | None = None,
    local_steps: int | None = None,
    lr: float | None = None,
    before: str | Path | None = None,
    after: str | Path | None = None,
    knowledge: Level = "realistic",
    budget: Budget = "standard",
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Rebuilt:
    """Attack one captured update: a safetensors file (or `Update`), or the difference of two checkpoints.

    `model` must hold the weights the update was computed on, unless `before` gives them. Shape, classes, batch size and
    normalisation are taken from the file's metadata where they are not given.
    """
    sent, facts = _read(update, before, after)
    shape = _shape(input_shape if input_shape is not None else facts.get("input_shape"))
    classes = num_classes or facts.get("num_classes")
    module = _module(model, shape, classes)
    function = ModelFunction(module, find_loss(loss))
    state = function.state()
    if before is not None:
        state, sent = _states(function, state, before, after, update, sent)
    elif sent is None:
        raise UserError("give an update file, or two checkpoints with --before and --after.")
    named = "the update" if isinstance(update, Update) else str(update or after)
    tensors = fit_to_model(named, sent.tensors, function.parameters(state))
    size = _number(batch_size or (sent.examples if update is not None else 1), "batch size", 1, _MOST_IMAGES)
    training = _training(sent, local_steps or facts.get("local_steps"), lr or facts.get("lr"))
    if training.lr is not None and training.epochs == 1:  # one step of SGD: its delta is the gradient, scaled
        sent = Update({n: -t / training.lr for n, t in tensors.items()}, "gradient", size)
        tensors, training = sent.tensors, LocalTraining()
    found = _classes(function, state, shape)
    if classes is not None and _number(classes, "number of classes", 1, 10**6) != found:
        raise UserError(f"the model has {found} outputs, not {classes}.")
    classes = found
    task = Task(
        function,
        shape,
        classes,
        mean=_channels(mean if mean is not None else facts.get("mean"), shape[0], 0.0),
        std=_channels(std if std is not None else facts.get("std"), shape[0], 1.0),
        has_classes=takes_classes(function.loss_fn, classes),
    )
    seen = [Sighting(state, Update(tensors, sent.kind, size))]
    observation = observe(task, seen, level=knowledge, training=training)
    if labels is not None:
        observation = _with_labels(observation, labels, size, classes)
    return _run(observation, attacks, budget, seed, progress)


def _run(
    observation: Observation,
    attacks: Sequence[str | Attack],
    budget: Budget,
    seed: int,
    progress: Callable[[str, int, int], None] | None,
) -> Rebuilt:
    from gradveil.attacks.matching.distances import RelativeL2

    found = Rebuilt()
    methods = [attack_methods.parse(a) for a in attacks]
    for method in methods:
        tick = (lambda done, total, name=method.spec: progress(name, done, total)) if progress else None
        try:
            reason = method.why_not(observation)
            if reason:
                found.not_applicable[method.spec] = reason
                continue
            answer = method([observation], seed=seed, budget=budget, progress=tick)[0]
            fit = _fit(observation, answer, RelativeL2())
        except Exception as error:  # one that fails on this update or model; the others may not
            found.not_applicable[method.spec] = f"it failed ({type(error).__name__}: {' '.join(str(error).split())})"
            continue
        found.by_attack[method.spec], found.fit[method.spec] = answer, fit
    if not found.by_attack:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.not_applicable.items())
        raise UserError(f"no attack applies ({reasons}).")
    return found


def _fit(observation: Observation, answer: Reconstruction, distance: Any) -> float:
    """How far the images' own update is from the observed one, as a share: the same measure for every attack."""
    if answer.failed or answer.labels is None:
        return float("inf")
    x = observation.task.normalize(answer.images)
    noise = observation.model.draw_noise(len(x), torch.Generator().manual_seed(0))
    noise = {k: v[None] for k, v in noise.items()}
    training = observation.knowledge.training
    with torch.no_grad():
        ours = observation.model.updates(observation.state, x[None], answer.labels[None], training, noise)
        theirs = [observation.update.tensors[n][None] for n in observation.model.trainable]
        return float(distance([ours[n] for n in observation.model.trainable], theirs))


def _read(
    update: str | Path | Update | None, before: str | Path | None, after: str | Path | None
) -> tuple[Update | None, dict[str, Any]]:
    if isinstance(update, Update):
        return update, {}
    if update is not None:
        return load_update(update)
    if before is None or after is None:
        raise UserError("give an update file, or two checkpoints with --before and --after.")
    return None, {}


def _states(
    function: ModelFunction,
    state: Tensors,
    before: str | Path,
    after: str | Path | None,
    update: str | Path | Update | None,
    sent: Update | None,
) -> tuple[Tensors, Update]:
    expected = function.parameters(state)
    if update is not None:
        assert sent is not None
        start, _ = load_tensors(before)
    else:
        assert after is not None
        start, sent = difference(before, after, expected)
    fit_to_model(before, {n: t for n, t in start.items() if n in expected}, expected)
    known = {n: t.to(state[n].dtype) for n, t in start.items() if n in state and t.shape == state[n].shape}
    return {**state, **known}, sent


def _training(sent: Update, steps: int | None, lr: float | None) -> LocalTraining:
    if sent.kind == "gradient":
        return LocalTraining()
    if not lr:
        raise UserError(
            "a weight delta needs the client's learning rate: give --lr (and --local-steps if more than one)."
        )
    if not isinstance(lr, (int, float)) or not 0 < lr < 1e6:
        raise UserError(f"learning rate {lr!r} is not a positive number.")
    return LocalTraining(epochs=_number(steps or 1, "number of local steps", 1, 1000), lr=float(lr))


def _shape(given: Any) -> tuple[int, int, int]:
    if given is None:
        raise UserError("the update does not say its images' shape: give --input-shape C,H,W.")
    if (
        not isinstance(given, (list, tuple))
        or len(given) != 3
        or not all(isinstance(n, int) and 0 < n <= 4096 for n in given)
    ):
        raise UserError(f"input shape {given} is not channels, height, width.")
    return (given[0], given[1], given[2])


def _module(model: Any, shape: tuple[int, int, int], classes: int | None) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if classes is None:
        raise UserError("give the number of classes: --classes N.")
    return models.build(model, input_shape=shape, num_classes=classes)


def _classes(function: ModelFunction, state: Tensors, shape: tuple[int, int, int]) -> int:
    try:
        with torch.no_grad():
            output = function(state, torch.zeros(2, *shape), function.draw_noise(2, torch.Generator()))
    except (Exception, SystemExit) as error:  # whatever a user's forward pass raises is the message
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the model does not take images of {'×'.join(map(str, shape))}: {reason}") from None
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim != 2:
        found = f"{output.dtype} of {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UserError(f"the model's output is {found}; a row of scores for each image is needed.")
    return int(output.shape[-1])


def _number(value: Any, what: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UserError(f"{what} {value!r} is not a whole number from {least} to {most}.")
    return value


def _channels(given: Any, channels: int, default: float) -> Tensor:
    if given is None:
        return torch.full((channels,), default)
    given = [given] if isinstance(given, (int, float)) else given
    if isinstance(given, str) or not all(isinstance(v, (int, float)) for v in given):
        raise UserError(f"mean or std {given!r} is not a list of numbers.")
    values = torch.as_tensor(list(given), dtype=torch.float32)
    if len(values) not in (1, channels):
        raise UserError(f"{len(values)} values of mean or std for {channels} channels.")
    if not torch.isfinite(values).all() or (default == 1.0 and not (values > 0).all()):
        raise UserError(f"mean or std {values.tolist()} cannot normalise images: finite numbers, and a std above zero.")
    return values.expand(channels).clone()


def _with_labels(observation: Observation, labels: Sequence[int], size: int, classes: int) -> Observation:
    from dataclasses import replace

    if not observation.task.has_classes:
        raise UserError("under this loss an image has a row of numbers and no class; leave out the labels.")
    if len(labels) != size or not all(0 <= label < classes for label in labels):
        raise UserError(f"{len(labels)} labels for a batch of {size}; each must be below {classes}.")
    return replace(observation, knowledge=replace(observation.knowledge, labels=torch.tensor(list(labels))))


def _drawer(images: Tensor) -> Callable[[Path], None]:
    from gradveil.core.notebook import strip

    return lambda path: strip(images).save(path, format="PNG")


__all__ = ["Rebuilt", "attack_update"]
