"""The search for ATS policies (Gao et al. 2021, Algorithm 1): random policies, two cheap scores each, the best kept.

Privacy, lower is better: how early the gradient gives away where the image lies, on the straight way from noise to it.
Accuracy: how differently a fresh network treats different images (Mellor et al. 2020), beside untransformed ones.
Read from the published code where the paper is silent or slips: points at both ends of the way, a cosine for every
tensor and their mean, the sign of the accuracy score. Its threshold of −85 belongs to one set and one batch size, so
here the accuracy score is per image and relative to no transformation. Every candidate is scored, also the first ones.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction, copied
from gradveil.core.progress import Progress
from gradveil.core.randomness import generator
from gradveil.core.settings import settings
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.data.ats.defense import (
    ATS,
    LONGEST,
    Draw,
    Policy,
    random_policy,
    transform,
)
from gradveil.defenses.data.ats.scores import Candidate, Json, Score, ScoreLog, SearchResult
from gradveil.models import build
from gradveil.processes.scheduler import Perform, ThisProcess, Workers, run_jobs
from gradveil.processes.worker import ProcessWorkers
from gradveil.storage.files import alone_in, write_json, write_tensors
from gradveil.storage.resumable import Shuffled, resumable, trained_once

NO_POLICY: Policy = ()
EPSILON = 1e-5  # Eq. 10
_FLOATS = 2**22  # gradients held at once: more does not fit the processor's caches and is slower


@settings
class Search:
    """How wide to search. The paper takes 1,500 candidates and 100 images, which is hours without a GPU."""

    candidates: int = Field(default=100, ge=2)
    images: int = Field(default=20, ge=2)
    points: int = Field(default=21, ge=2)  # 20 steps from noise to image
    keep: int = Field(default=2, ge=1)  # policies in the hybrid; Table 1 joins the best two
    # How far the accuracy score may fall below no transformation's (about −1). The published threshold, −85 on some 63
    # images, is −1.35 an image.
    loss: float = Field(default=0.35, ge=0)
    rounds: int = Field(default=4, ge=1)  # draws the accuracy score is averaged over; the paper has ten
    share: float = Field(default=0.1, gt=0, le=1)  # of the training images, for the half-trained model
    epochs: int = Field(default=50, ge=1)  # of its training
    seed: int = Field(default=0, ge=0)


# -- the scores --------------------------------------------------------------------------------------------------------


class Scorer:
    """Both scores of a policy, on fixed images, fixed noise and two states of one model; the same in every process."""

    def __init__(self, module: nn.Module, tensors: Tensors, search: Search):
        self.function, self.search, self.tensors = ModelFunction(module), search, tensors
        self.images = Batch(tensors["images"], tensors["labels"])
        self.trained = {n: tensors[f"trained.{n}"] for n in self.function.state()}
        self.fresh = {n: tensors[f"fresh.{n}"] for n in self.function.state()}
        self.noise = torch.rand(self.images.x.shape, generator=generator(search.seed, "ats-noise"))
        self._baseline = self._spread(NO_POLICY)

    def __call__(self, policy: Policy) -> Score:
        accuracy = self.accuracy(policy)
        privacy = self.privacy(policy) if accuracy >= -self.search.loss else None
        if not math.isfinite(accuracy) or not math.isfinite(privacy or 0.0):
            return Score.lost(policy, "its scores are not finite")
        return Score(policy, accuracy, privacy)

    def privacy(self, policy: Policy) -> float:
        """Eq. 6: the area under the similarity of gradients, from noise (0) to the transformed image (1)."""
        return float(torch.trapezoid(self.similarity(policy), dx=1 / (self.search.points - 1), dim=1).mean())

    def similarity(self, policy: Policy) -> Tensor:
        """Images × points: how like the image's gradient is to that of every point on the way to it."""
        images, points = self._transformed(policy, 0), self.search.points
        way = torch.linspace(0, 1, points).view(1, -1, 1, 1, 1)
        x = self._normalize((1 - way) * self.noise[:, None] + way * images[:, None])  # images × points × C × H × W
        size = sum(p.numel() for p in self.function.parameters(self.trained).values())
        rows = max(1, _FLOATS // (size * points))
        return torch.cat([self._along(x[i : i + rows], self.images.y[i : i + rows]) for i in range(0, len(x), rows)])

    def _along(self, x: Tensor, y: Tensor) -> Tensor:
        images, points = x.shape[:2]
        with torch.no_grad():
            each = y.repeat_interleave(points)[:, None]
            found = self.function.gradients(self.trained, x.flatten(0, 1)[:, None], each)
        similar = torch.zeros(images, points)
        for g in found.values():
            along = g.view(images, points, -1)
            similar += F.cosine_similarity(along, along[:, -1:], dim=2, eps=1e-12)
        return similar / len(found)

    def accuracy(self, policy: Policy) -> float:
        """Eq. 10, turned so that higher is better, per image, less the score of no transformation."""
        return self._spread(policy) - self._baseline

    def _spread(self, policy: Policy) -> float:
        values = []
        for draw in range(self.search.rounds):
            x = self._normalize(self._transformed(policy, draw)).requires_grad_()
            (jacobian,) = torch.autograd.grad(self.function(self.fresh, x).sum(), x)
            alike = torch.corrcoef(jacobian.flatten(1).double())
            eigenvalues = torch.linalg.eigvalsh(torch.nan_to_num(alike)).clamp_min(0) + EPSILON
            values.append(-(eigenvalues.log() + 1 / eigenvalues).mean())
        return float(torch.stack(values).mean())

    def _transformed(self, policy: Policy, draw: int) -> Tensor:
        return _prepared(self.images.x, policy, generator(self.search.seed, "ats-draw", draw))

    def _normalize(self, x: Tensor) -> Tensor:
        return (x - self.tensors["mean"].view(-1, 1, 1)) / self.tensors["std"].view(-1, 1, 1)


def _prepared(images: Tensor, policy: Policy, rng: torch.Generator) -> Tensor:
    """As the training pipeline hands images on: cropped, flipped, then transformed. Draws are the same for any policy."""
    default = ATS()
    drawn = Draw.make(len(images), ((0,) * LONGEST,), default.crop, default.flip, rng)
    return transform(images, (policy,), drawn, default.crop)


# -- the search --------------------------------------------------------------------------------------------------------


def search_policy(
    module: nn.Module,
    train: Batch,
    images: Batch,
    *,
    mean: Tensor,
    std: Tensor,
    search: Search,
    num_classes: int,
    file: Path | None = None,
    workers: int = 1,
    model: str | None = None,
    about: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The best policies for a freshly made `module` and these images.

    The policy is written to `file`, and beside it every finished candidate, so that a search that was stopped goes on
    where it was. Where the text `model` names the module, `workers` processes do the scoring, so that one that crashes
    or runs out of memory takes only its candidate with it; else this one does. `about` says in the file what the policy
    was found on.
    """
    picked = torch.randperm(len(images), generator=generator(search.seed, "ats-images"))[: search.images]
    if len(picked) < search.images:
        raise UserError(f"the search asks for {search.images} images; the data has {len(picked)} for it.")
    folder = file.with_suffix(".search") if file else None
    with alone_in(folder, "search") if folder else nullcontext():
        fresh = ModelFunction(module).state()
        trained = half_trained(module, train, mean=mean, std=std, search=search, folder=folder, progress=progress)
        tensors = {"images": images.x[picked], "labels": images.hard_labels[picked], "mean": mean, "std": std}
        tensors["classes"] = torch.tensor(num_classes)
        tensors |= {f"fresh.{n}": t for n, t in fresh.items()} | {f"trained.{n}": t for n, t in trained.items()}

        scorer = Scorer(module, tensors, search)
        terms = replace(search, candidates=2, keep=1)  # a wider search goes on with the same scores
        wanted = candidates(search)

        def note() -> None:
            if progress:
                progress("scoring policies", sum(p in log.scores for p in wanted), len(wanted))

        log = ScoreLog(folder / "scores.jsonl" if folder else None, _digest(tensors, repr(terms)), note)
        todo = [Candidate(policy) for policy in wanted if policy not in log.scores]
        with _scoring(scorer, model, workers) as scoring:
            run_jobs(todo, scoring, log)
        result = choose([log.scores[policy] for policy in wanted], search, scorer.privacy(NO_POLICY))
        if file:
            write_json(file, {**result.plain(), "found_on": dict(about or {}), "search": asdict(search)})
        return result


@contextmanager
def _scoring(scorer: Scorer, model: str | None, workers: int) -> Iterator[Workers[Candidate, Json]]:
    """Worker processes, if `model` names the model in every process; else this process."""
    if model is None or not workers:
        yield ThisProcess(lambda job, second_try, progress: scorer(job.policy).plain(), lost=Exception)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(file := Path(folder) / "search.safetensors", scorer.tensors)
        setup = {"tensors": str(file), "search": asdict(scorer.search), "model": model}
        yield ProcessWorkers(prepare_scorer, setup, lambda job: job.policy, workers)


def prepare_scorer(setup: Json) -> Perform[Policy, Json]:
    """In a worker process: a scorer like the parent's."""
    tensors = load_file(setup["tensors"])
    channels, height, width = tensors["images"].shape[1:]
    module = build(setup["model"], input_shape=(channels, height, width), num_classes=int(tensors["classes"]))
    scorer = Scorer(module, tensors, Search(**setup["search"]))
    return lambda policy, second_try, progress: scorer(tuple(policy)).plain()


def candidates(search: Search) -> list[Policy]:
    """Random policies, no two alike. More of them begin with the same ones, so that a search can be widened."""
    rng, found = generator(search.seed, "ats-candidates"), dict[Policy, None]()
    while len(found) < search.candidates:
        found[random_policy(rng)] = None
    return list(found)


def choose(scores: Iterable[Score], search: Search, untransformed: float) -> SearchResult:
    """The candidates with the lowest privacy score; of two that share a function the better one."""
    scores = list(scores)
    failed = tuple(s for s in scores if s.failed)
    ranking = sorted((s for s in scores if s.privacy is not None), key=lambda s: (s.privacy, s.policy))
    kept: list[Policy] = []
    for score in ranking:
        if len(kept) < search.keep and not any(set(score.policy) & set(policy) for policy in kept):
            kept.append(score.policy)
    if len(kept) < search.keep:
        lost = f" ({len(failed)} could not be scored, the first because {failed[0].failed})" if failed else ""
        raise UserError(
            f"only {len(ranking)} of {len(scores)} candidates keep the accuracy{lost}, too few for a hybrid of "
            f"{search.keep} policies; search more candidates."
        )
    return SearchResult(tuple(kept), tuple(ranking), len(scores) - len(ranking) - len(failed), untransformed, failed)


def half_trained(
    module: nn.Module,
    train: Batch,
    *,
    mean: Tensor,
    std: Tensor,
    search: Search,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Tensors:
    """M^s: the model after a short training on a share of the images, cropped and flipped as the authors' pipeline does.

    Adam, so that one setting suits any model.
    """
    rng = generator(search.seed, "ats-training")
    part = train[torch.randperm(len(train), generator=rng)[: max(1, round(search.share * len(train)))]]
    part = Batch(part.x, part.hard_labels)
    before = {f"fresh.{n}": t for n, t in ModelFunction(module).state().items()}
    key = _digest(
        {**before, "x": part.x, "y": part.y, "mean": mean, "std": std}, f"prepared/{search.epochs}/{search.seed}"
    )
    file = folder / f"half-trained-{key}.safetensors" if folder else None

    def training(checkpoint: Path | None) -> Tensors:
        model = copied(module).train()
        optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
        shuffled = Shuffled(len(part), 32, rng)
        steps = shuffled.steps(search.epochs)
        with torch.random.fork_rng(devices=[]):  # dropout knows the global stream alone
            torch.default_generator.manual_seed(generator(search.seed, "ats-dropout").initial_seed())
            parts = (model, optimizer, shuffled, rng, torch.default_generator)
            for step in resumable(steps, checkpoint, parts):
                rows = shuffled.draw()
                if len(rows) > 1 or len(part) == 1:  # batch norm has no statistics of a single image
                    optimizer.zero_grad()
                    x = (_prepared(part.x[rows], NO_POLICY, rng) - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
                    F.cross_entropy(model(x), part.y[rows]).backward()
                    optimizer.step()
                if progress:
                    progress("training the half-trained model", step + 1, steps)
        return ModelFunction(model).state()

    return trained_once(file, training)


def _digest(tensors: Tensors, terms: str) -> str:
    digest = hashlib.sha256(terms.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
