"""Attack an update that was captured elsewhere. No truth is needed: rebuilt images are judged by how they explain it."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from safetensors.torch import save
from torch import Tensor, nn

from gradveil import attacks as attack_methods
from gradveil import models
from gradveil.attacks.base import Attack, Budget
from gradveil.attacks.matching.distances import RelativeL2, fitted
from gradveil.attacks.unit_length import unit_length
from gradveil.core.errors import UserError, one_line, shape_text
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.losses import DEFAULT, find_loss, takes_classes
from gradveil.core.notebook import figure, strip
from gradveil.core.observation import Observation, Reconstruction, Sighting, observe
from gradveil.core.options import Option
from gradveil.core.progress import Progress
from gradveil.core.randomness import TorchStream, torch_stream
from gradveil.core.settings import first_error
from gradveil.core.task import Task
from gradveil.core.types import Kind, Mode, Shape, Tensors, Update
from gradveil.data.raw import MAX_CHANNELS, MAX_CLASSES, MAX_SIDE
from gradveil.storage.files import write_indexed
from gradveil.storage.updates import difference, fit_to_model, load_tensors, load_update

Size = Annotated[int, Field(strict=True, ge=1, le=4096)]
Mean = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-1e6, le=1e6)]
Std = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1e-6, le=1e6)]
MAX_STEPS = 1000
MAX_IMAGE = 1 << 23  # numbers of one image
MAX_PIXELS = 1 << 26  # of all images of a batch together, in all channels; an attack holds several copies of them


# Of the squared difference between the update of rebuilt images and the captured one, as a share of its size.
ALIKE = 1e-4  # one percent of its length
HALF = 0.5
NOT_ALONE = (
    "Other images may send the same update, above all in a batch or where it has fewer numbers than the images have pixels."
)
NO_PROTECTION = (
    "That is no protection: a stronger attack, a larger budget, the right labels or more of the client's settings may succeed."
)


class CapturedSpec(BaseModel):
    """What is known of a captured update. The metadata of its file fills in the task and the local training."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    input_shape: Shape | None = Field(None, description="Shape of one image: C,H,W.")
    num_classes: Annotated[int | None, Option("classes")] = Field(
        None, strict=True, ge=1, le=MAX_CLASSES, description="Outputs of the model."
    )
    mean: tuple[Mean, ...] | None = Field(
        None, max_length=MAX_CHANNELS, description="Of the pixels, one value per channel: 0.5,0.4,0.4."
    )
    std: tuple[Std, ...] | None = Field(None, max_length=MAX_CHANNELS, description="Of the pixels, one value per channel.")
    local_steps: int | None = Field(None, strict=True, ge=1, le=1000, description="Steps on all images behind a weight delta.")
    local_epochs: int | None = Field(None, strict=True, ge=1, le=1000, description="Or passes over them in mini-batches.")
    local_batch_size: int | None = Field(None, strict=True, ge=1, le=4096, description="Images in a mini-batch. [all]")
    local_optimizer: str = Field("sgd", max_length=200, description="sgd:momentum=0.9, adam, adamw:weight_decay=0.01")
    lr: float | None = Field(None, strict=True, gt=0, lt=1e6, description="Learning rate behind a weight delta.")
    mode: Mode = Field("train", description="What dropout and BatchNorm did on the client: train or eval.")
    batch_size: Size | None = Field(None, description="Images behind the update. [of the file, or 1]")
    labels: tuple[int, ...] | None = Field(None, description="Labels, if they are known: 3,7. [inferred]")
    loss: Any = Field(DEFAULT, description="Name, or pkg.mod:factory.")
    before: Path | None = Field(None, description="Checkpoint of the round's start (safetensors).")
    after: Path | None = Field(None, description="Checkpoint after the round, in place of UPDATE.")
    knowledge: Literal["realistic", "paper"] = Field("realistic", description="realistic, or paper with known labels.")
    budget: Budget = Field("standard", description="quick, standard or thorough.")
    seed: int = Field(0, ge=0, description="Seed of all randomness.")

    @field_validator("input_shape", mode="before")
    @classmethod
    def _three_sizes(cls, value: object) -> object:
        sizes = value if isinstance(value, (list, tuple)) else ()
        limits = (MAX_CHANNELS, MAX_SIDE, MAX_SIDE)
        fits = len(sizes) == 3 and all(type(n) is int and 0 < n <= most for n, most in zip(sizes, limits, strict=True))
        if value is not None and not (fits and math.prod(sizes) <= MAX_IMAGE):
            raise ValueError(f"not channels, height, width of at most {shape_text(limits)} and {MAX_IMAGE:,} numbers in all")
        return value

    @field_validator("mean", "std", mode="before")
    @classmethod
    def _several(cls, value: object) -> object:
        return [value] if isinstance(value, (int, float)) else value


# What an update's metadata may tell: the task and the local training.
TRAINING_FACTS = ("local_steps", "local_epochs", "local_batch_size", "local_optimizer", "lr", "mode")
FACTS = ("input_shape", "num_classes", "mean", "std", *TRAINING_FACTS)


@dataclass
class Rebuilt:
    """The reconstructions of one update, by attack; attacks that do not apply, with the reason.

    `fit` is how far the update of the rebuilt images is from the observed one, squared, as a share of its size.
    """

    by_attack: dict[str, Reconstruction] = field(default_factory=dict)
    not_applicable: dict[str, str] = field(default_factory=dict)
    fit: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The attack whose images fit the update best, by one common measure of the adversary."""
        return min(self.by_attack, key=self.fit.__getitem__)

    @property
    def verdict(self) -> str:
        """What the best fit says of the private images, and what it does not say."""
        images, fit = self.by_attack[self.best].images, self.fit[self.best]
        ours = "this picture" if len(images) == 1 else f"these {len(images)} pictures"
        if not math.isfinite(fit):
            return f"Nothing can be told: no attack gave pictures whose update can be compared. {NO_PROTECTION}"
        share = f"{100 * (1 - fit):.3g}%"
        explained = f"{'its' if len(images) == 1 else 'their'} update explains {share} of the one that was captured"
        if fit <= ALIKE:
            return f"This update was made from something very like {ours}: {explained}. {NOT_ALONE}"
        if fit <= HALF:
            return (
                f"This update may have been made from something like {ours}: {explained}. The rest may be a defense, or a "
                f"search that has not ended; only who has the private images can tell how much is true. {NOT_ALONE}"
            )
        return f"Nothing was recovered: the best pictures' update explains only {share} of this one. {NO_PROTECTION}"

    def picture(self, spec: str) -> str:
        """The name of the file with the pictures of one attack."""
        return f"{_stem(spec)}.png"

    def _repr_html_(self) -> str:
        """As a notebook shows it: the best fit first."""
        return "".join(
            figure(self.by_attack[name].images, f"{name}: differs by {100 * self.fit[name] ** 0.5:.2g}% of the update")
            for name in sorted(self.by_attack, key=self.fit.__getitem__)
        )

    def save(self, folder: str | Path) -> Path:
        """`FOLDER/ATTACK.safetensors` and `.png` for each attack, and `attack.json`.

        Files of those names that no earlier `save` wrote there are refused and stay as they are.
        """
        folder, contents, rows = Path(folder), dict[str, bytes](), []
        for spec, answer in self.by_attack.items():
            files = [f"{_stem(spec)}.safetensors", self.picture(spec)]
            strip(answer.images).save(picture := io.BytesIO(), format="PNG")
            images = answer.images.detach().cpu().contiguous().clone()
            contents |= {files[0]: save({"images": images}), files[1]: picture.getvalue()}
            rows.append(
                {
                    "spec": spec,
                    "fit": self.fit[spec] if math.isfinite(self.fit[spec]) else None,
                    "labels": None if answer.labels is None else answer.labels.tolist(),
                    "seconds": answer.seconds,
                    "failed": answer.failed,
                    "iterations": answer.iterations,
                    "files": files,
                }
            )
        facts = {"best": self.best, "verdict": self.verdict, "not_applicable": self.not_applicable, "attacks": rows}
        write_indexed(folder, contents, "attack.json", facts)
        return folder


def _stem(spec: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in spec)


def attack_update(
    update: str | Path | Update | None = None,
    model: str | nn.Module | Callable[..., nn.Module] = "lenet",
    input_shape: Sequence[int] | None = None,
    attacks: Sequence[str | Attack] = ("linear", "rgap", "swift"),
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Rebuilt:
    """Attack one captured update: a safetensors file (or `Update`), or the difference of two checkpoints.

    `model` must hold the weights the update was computed on, unless `before` gives them. `options` are the other fields
    of `CapturedSpec`; shape, classes, normalisation and local training are read from the file's metadata where they are
    left out.
    """
    sent, facts = load_update(update) if isinstance(update, (str, Path)) else (update, {})
    spec = _spec(facts, {"input_shape": input_shape, **options})
    if sent is None and (spec.before is None or spec.after is None):
        raise UserError("give an update file, or two checkpoints with --before and --after.")
    methods = [attack_methods.parse(a) for a in attacks]
    name = "the update" if isinstance(update, Update) else str(update or spec.after)
    return _run(_observation(spec, model, sent, name), methods, spec, progress)


def _spec(facts: dict[str, Any], options: dict[str, Any]) -> CapturedSpec:
    """What the caller says goes before what the file's metadata says."""
    told = {n: v for n, v in facts.items() if n in FACTS}
    try:
        return CapturedSpec.model_validate(told | {n: v for n, v in options.items() if v is not None})
    except ValidationError as error:
        raise UserError(first_error(error)) from None


# -- the observation ---------------------------------------------------------------------------------------------------


def _observation(spec: CapturedSpec, model: Any, sent: Update | None, name: str) -> Observation:
    if spec.input_shape is None:
        raise UserError("the update does not say its images' shape: give --input-shape C,H,W.")
    _check_size(spec, model, sent, name)
    function = ModelFunction(_module(model, spec.input_shape, spec.num_classes), find_loss(spec.loss), spec.mode)
    state, sent = _start(spec, function, sent)
    tensors = fit_to_model(name, sent.tensors, function.parameters(state))
    images = spec.batch_size or sent.examples
    if images > 4096 or images * math.prod(spec.input_shape) > MAX_PIXELS:
        size = shape_text(spec.input_shape)
        raise UserError(
            f"{images} images of {size} are said to be behind the update; attacks take at most 4096, or fewer large ones."
        )
    update, training = Update(tensors, sent.kind, images), _training(sent.kind, spec, images)
    outputs = _outputs(function, state, spec.input_shape)
    if spec.num_classes not in (None, outputs):
        raise UserError(f"the model has {outputs} outputs, not {spec.num_classes}.")
    mean, std = (_per_channel(v, spec.input_shape[0], d) for v, d in ((spec.mean, 0.0), (spec.std, 1.0)))
    task = Task(function, spec.input_shape, outputs, mean, std, takes_classes(function.loss_fn, outputs))
    seen = observe(task, [Sighting(state, update)], level=spec.knowledge, training=training)
    return seen if spec.labels is None else _with_labels(seen, spec.labels)


def _check_size(spec: CapturedSpec, model: object, sent: Update | None, name: str) -> None:
    """Refuse an update that does not fit a model with a name, before memory is taken for the model.

    Its shape and classes may come from the file, which may claim any.
    """
    if not isinstance(model, str) or spec.input_shape is None or spec.num_classes is None:
        return
    shapes = models.parameter_shapes(model, input_shape=spec.input_shape, num_classes=spec.num_classes)
    tensors = sent.tensors if sent else load_tensors(spec.before or "")[0]
    if shapes is not None:
        fit_to_model(name if sent else str(spec.before), {n: t for n, t in tensors.items() if sent or n in shapes}, shapes)


def _start(spec: CapturedSpec, function: ModelFunction, sent: Update | None) -> tuple[Tensors, Update]:
    """The state that the update was computed on, and the update: of the checkpoints where these are given."""
    state = function.state()
    if spec.before is None:
        assert sent is not None
        return state, sent
    expected = function.parameters(state)
    if sent is None:
        assert spec.after is not None
        start, sent = difference(spec.before, spec.after, expected)
    else:
        start, _ = load_tensors(spec.before)
    fit_to_model(spec.before, {n: t for n, t in start.items() if n in expected}, expected)
    loaded = {n: t.to(state[n].dtype) for n, t in start.items() if n in state and t.shape == state[n].shape}
    return {**state, **loaded}, sent


def _training(kind: Kind, spec: CapturedSpec, images: int) -> LocalTraining:
    """The local training behind the update."""
    if kind == "gradient":
        return LocalTraining(mode=spec.mode)
    if spec.lr is None:
        raise UserError("a weight delta needs the learning rate: give --lr (and --local-steps if more than one).")
    if spec.local_steps and spec.local_epochs:
        raise UserError("give --local-steps, or --local-epochs and --local-batch-size, not both.")
    epochs = spec.local_steps or spec.local_epochs or 1
    training = LocalTraining(
        epochs=epochs, batch_size=spec.local_batch_size, lr=spec.lr, optimizer=spec.local_optimizer, mode=spec.mode
    )
    if (steps := training.number_of_mini_batches(images)) > MAX_STEPS:
        raise UserError(f"{steps:,} local steps are said to be behind the update; attacks simulate at most {MAX_STEPS:,}.")
    return training


def _module(model: Any, shape: Shape, classes: int | None) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if classes is None:
        raise UserError("give the number of classes: --classes N.")
    return models.build(model, input_shape=shape, num_classes=classes)


def _outputs(function: ModelFunction, state: Tensors, shape: Shape) -> int:
    try:
        with torch.no_grad():
            output = function(state, torch.zeros(2, *shape), function.draw_noise(2, TorchStream()))
    except (Exception, SystemExit) as error:  # whatever a user's forward pass raises is the message
        raise UserError(f"the model does not take images of {shape_text(shape)}: {one_line(error)}") from None
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim != 2:
        kind = f"{output.dtype} of {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UserError(f"the model's output is {kind}; one row of scores per image is needed.")
    return int(output.shape[-1])


def _per_channel(values: tuple[float, ...] | None, channels: int, default: float) -> Tensor:
    if values is None:
        return torch.full((channels,), default)
    if len(values) not in (1, channels):
        raise UserError(f"{len(values)} values of mean or std for {channels} channels.")
    return torch.tensor(values, dtype=torch.float32).expand(channels).clone()


def _with_labels(observation: Observation, labels: tuple[int, ...]) -> Observation:
    task, images = observation.task, observation.knowledge.batch_size
    if not task.has_classes:
        raise UserError("under this loss an image has a row of numbers and no class; leave out the labels.")
    if len(labels) != images or not all(0 <= label < task.num_outputs for label in labels):
        raise UserError(f"{len(labels)} labels for a batch of {images}; each must be below {task.num_outputs}.")
    return replace(observation, knowledge=replace(observation.knowledge, labels=torch.tensor(labels)))


# -- the attacks -------------------------------------------------------------------------------------------------------


def _run(observation: Observation, methods: Sequence[Attack], spec: CapturedSpec, progress: Progress | None) -> Rebuilt:
    rebuilt = Rebuilt()
    for method in methods:
        tick = partial(progress, method.spec) if progress else None
        try:
            if reason := method.why_not(observation):
                rebuilt.not_applicable[method.spec] = reason
                continue
            answer = method([observation], seed=spec.seed, budget=spec.budget, progress=tick)[0]
            fit = _fit(observation, answer)
        except Exception as error:  # one that fails on this update or model; the others may not
            rebuilt.not_applicable[method.spec] = f"it failed ({type(error).__name__}: {one_line(error)})"
            continue
        rebuilt.by_attack[method.spec], rebuilt.fit[method.spec] = answer, fit
    if not rebuilt.by_attack:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rebuilt.not_applicable.items())
        raise UserError(f"no attack applies ({reasons}).")
    return rebuilt


def _fit(observation: Observation, answer: Reconstruction) -> float:
    """How far the update of the rebuilt images is from the observed one, as a share: the same for every attack."""
    if answer.failed or answer.labels is None:
        return math.inf
    observation = unit_length(observation)
    model, x = observation.model, observation.task.normalize(answer.images)
    noise = {k: v[None] for k, v in model.draw_noise(len(x), torch_stream(0)).items()}
    with torch.no_grad():
        ours = model.updates(observation.state, x[None], answer.labels[None], observation.knowledge.training, noise)
        theirs = [observation.update.tensors[n][None] for n in model.trainable]
        return float(RelativeL2()(fitted([ours[n] for n in model.trainable], theirs), theirs))
