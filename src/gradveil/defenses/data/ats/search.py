"""The search for ATS policies (Gao et al. 2021, Algorithm 1): score random policies by two cheap scores, keep the best.

Privacy (lower is better): how early the gradient reveals the image on the straight path from noise to it. Accuracy: how
differently a fresh network treats different images (Mellor et al. 2020), compared with untransformed images. Where the
paper is silent or wrong, the published code decides: points at both ends of the path, the mean of one cosine per tensor,
the sign of the accuracy score. The published threshold of −85 belongs to one data set and one batch size, so here the
accuracy score is per image and relative to no transformation. Every candidate is scored, the first ones included.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction, copied
from gradveil.core.hashing import digest
from gradveil.core.progress import Progress
from gradveil.core.randomness import Stream, generator, seeded
from gradveil.core.settings import settings
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.data.ats.defense import ATS, LONGEST, Draw, Policy, random_policy, transform
from gradveil.defenses.data.ats.scores import Candidate, Json, Score, ScoreLog, SearchResult
from gradveil.models import build
from gradveil.processes.scheduler import Perform, ThisProcess, Workers, run_jobs
from gradveil.processes.temporary import TemporaryFolder
from gradveil.processes.worker import ProcessWorkers
from gradveil.storage.files import alone_in, write_tensors
from gradveil.storage.resumable import Shuffled, resumable, trained_once
from gradveil.storage.tensor_file import read_tensors

NO_POLICY: Policy = ()
EPSILON = 1e-5  # Eq. 10
_FLOATS = 2**22  # values of gradients in memory at a time; more do not fit into the processor caches and are slower


@settings
class Search:
    """The size of a search. The paper has 1,500 candidates and 100 images, which takes hours without a GPU.

    Table 1 combines the best two policies. The accuracy score of no transformation is about −1; the published threshold,
    −85 on about 63 images, is −1.35 per image. The paper averages that score over ten draws.
    """

    candidates: int = Field(default=100, ge=2, description="Random policies to score.")
    images: int = Field(default=20, ge=2, description="Images that a policy is scored on.")
    points: int = Field(default=21, ge=2, description="Points from noise to image.")
    keep: int = Field(default=2, ge=1, description="Policies in the hybrid.")
    loss: float = Field(default=0.35, ge=0, description="Accuracy score that a policy may lose.")
    rounds: int = Field(default=4, ge=1, description="Draws per accuracy score.")
    share: float = Field(default=0.1, gt=0, le=1, description="Share of images that train the model.")
    epochs: int = Field(default=50, ge=1, description="Epochs of that training.")
    seed: int = Field(default=0, ge=0, description="Seed of all randomness.")


class Scorer:
    """Both scores of a policy, on fixed images, fixed noise and two states of a model; the same in every process.

    Args:
        tensors: `images`, `labels`, and the fresh and the half-trained state as `fresh.NAME` and `trained.NAME`.
    """

    def __init__(self, task: Task, tensors: Tensors, search: Search):
        self.task, self.search, self.tensors = task, search, tensors
        self.images = Batch(tensors["images"], tensors["labels"])
        names = task.model.state()
        self.fresh, self.trained = ({n: tensors[f"{state}.{n}"] for n in names} for state in ("fresh", "trained"))
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
        """Images × points: the similarity between the gradients of the image and of every point on the path to it."""
        images, points = self._transformed(policy, 0), self.search.points
        share = torch.linspace(0, 1, points).view(1, -1, 1, 1, 1)
        x = self.task.normalize((1 - share) * self.noise[:, None] + share * images[:, None])  # images × points × C × H × W
        size = sum(p.numel() for p in self.task.model.parameters(self.trained).values())
        rows = max(1, _FLOATS // (size * points))
        return torch.cat([self._along(x[i : i + rows], self.images.y[i : i + rows]) for i in range(0, len(x), rows)])

    def _along(self, x: Tensor, y: Tensor) -> Tensor:
        images, points = x.shape[:2]
        with torch.no_grad():
            labels = y.repeat_interleave(points)[:, None]
            gradients = self.task.model.gradients(self.trained, x.flatten(0, 1)[:, None], labels)
        total = torch.zeros(images, points)
        for gradient in gradients.values():
            along = gradient.view(images, points, -1)
            total += F.cosine_similarity(along, along[:, -1:], dim=2, eps=1e-12)
        return total / len(gradients)

    def accuracy(self, policy: Policy) -> float:
        """Eq. 10 with the opposite sign (higher is better), per image, minus the score of no transformation."""
        return self._spread(policy) - self._baseline

    def _spread(self, policy: Policy) -> float:
        values = []
        for draw in range(self.search.rounds):
            x = self.task.normalize(self._transformed(policy, draw)).requires_grad_()
            (jacobian,) = torch.autograd.grad(self.task.model(self.fresh, x).sum(), x)
            correlation = torch.corrcoef(jacobian.flatten(1).double())
            eigenvalues = torch.linalg.eigvalsh(torch.nan_to_num(correlation)).clamp_min(0) + EPSILON
            values.append(-(eigenvalues.log() + 1 / eigenvalues).mean())
        return float(torch.stack(values).mean())

    def _transformed(self, policy: Policy, draw: int) -> Tensor:
        return _prepared(self.images.x, policy, generator(self.search.seed, "ats-draw", draw))


def _prepared(images: Tensor, policy: Policy, rng: Stream) -> Tensor:
    """Images as the training pipeline passes them on: cropped, flipped, transformed. Every policy has the same draws."""
    default = ATS()
    drawn = Draw.make(len(images), ((0,) * LONGEST,), default.crop, default.flip, rng)
    return transform(images, (policy,), drawn, default.crop)


def search_policy(
    task: Task,
    train: Batch,
    images: Batch,
    search: Search,
    *,
    folder: Path | None = None,
    workers: int = 1,
    model: str | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The best policies for a task whose model is freshly initialized.

    Args:
        train, images: to train the model on, and to score policies on.
        folder: for finished candidates, so that a stopped search continues with the others.
        workers: number of processes that score. A process that crashes or runs out of memory loses one candidate.
        model: the text that names the model; without it this process scores alone.
    """
    picked = torch.randperm(len(images), generator=generator(search.seed, "ats-images"))[: search.images]
    if len(picked) < search.images:
        raise UserError(f"the search needs {search.images} images; the data has {len(picked)} for it.")
    with alone_in(folder, "search") if folder else nullcontext():
        states = {"fresh": task.model.state(), "trained": half_trained(task, train, search, folder, progress)}
        tensors = {f"{state}.{n}": t for state, named in states.items() for n, t in named.items()}
        tensors |= {"images": images.x[picked], "labels": images.hard_labels[picked]}
        scorer = Scorer(task, tensors, search)
        terms = replace(search, candidates=2, keep=1)  # a wider search continues with the same scores
        wanted = candidates(search)

        def note() -> None:
            if progress:
                progress("scoring policies", sum(p in log.scores for p in wanted), len(wanted))

        key = digest(repr(terms), {**tensors, "mean": task.mean, "std": task.std})[:16]
        log = ScoreLog(folder / "scores.jsonl" if folder else None, key, note)
        todo = [Candidate(policy) for policy in wanted if policy not in log.scores]
        with _scoring(scorer, model, workers) as scoring:
            run_jobs(todo, scoring, log)
        return choose([log.scores[policy] for policy in wanted], search, scorer.privacy(NO_POLICY))


@contextmanager
def _scoring(scorer: Scorer, model: str | None, workers: int) -> Iterator[Workers[Candidate, Json]]:
    """Worker processes, if `model` names the model in every process; else this process."""
    if model is None or not workers:
        yield ThisProcess(lambda job, second_try, progress: scorer(job.policy).plain(), lost=Exception)
        return
    task = scorer.task
    with TemporaryFolder() as folder:
        constants = {"mean": task.mean, "std": task.std, "classes": torch.tensor(task.num_outputs)}
        write_tensors(file := folder / "search.safetensors", {**scorer.tensors, **constants})
        setup = {"tensors": str(file), "search": asdict(scorer.search), "model": model}
        yield ProcessWorkers(prepare_scorer, setup, lambda job: job.policy, workers)


def prepare_scorer(setup: Json) -> Perform[Policy, Json]:
    """In a worker process: a scorer like that of the parent process."""
    tensors = read_tensors(Path(setup["tensors"]))
    images, classes = Batch(tensors["images"], tensors["labels"]), int(tensors["classes"])
    module = build(setup["model"], input_shape=images.image_shape, num_classes=classes)
    task = Task(ModelFunction(module), images.image_shape, classes, tensors["mean"], tensors["std"])
    scorer = Scorer(task, tensors, Search(**setup["search"]))
    return lambda policy, second_try, progress: scorer(tuple(policy)).plain()


def candidates(search: Search) -> list[Policy]:
    """Different random policies. A longer list begins with the shorter one, so that a search can be widened."""
    rng, policies = generator(search.seed, "ats-candidates"), dict[Policy, None]()
    while len(policies) < search.candidates:
        policies[random_policy(rng)] = None
    return list(policies)


def choose(scores: Iterable[Score], search: Search, untransformed: float) -> SearchResult:
    """The candidates with the lowest privacy scores; of two that share a function, the better one."""
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
    task: Task, train: Batch, search: Search, folder: Path | None = None, progress: Progress | None = None
) -> Tensors:
    """M^s: the state after a short training on a share of the images, cropped and flipped as in the authors' pipeline.

    The optimizer is Adam, so that one setting suits every model.
    """
    rng = generator(search.seed, "ats-training")
    part = train[torch.randperm(len(train), generator=rng)[: max(1, round(search.share * len(train)))]]
    part = Batch(part.x, part.hard_labels)
    tensors = {"x": part.x, "y": part.y, "mean": task.mean, "std": task.std}
    tensors |= {f"fresh.{n}": t for n, t in task.model.state().items()}
    key = digest(f"prepared/{search.epochs}/{search.seed}", tensors)[:16]
    file = folder / f"half-trained-{key}.safetensors" if folder else None

    def training(checkpoint: Path | None) -> Tensors:
        model = copied(task.model.module).train()
        optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
        shuffled = Shuffled(len(part), 32, rng)
        steps = shuffled.steps(search.epochs)
        with seeded(search.seed, "ats-dropout"):  # dropout can use the global stream only
            parts = (model, optimizer, shuffled, rng, torch.default_generator)
            for step in resumable(steps, checkpoint, parts):
                rows = shuffled.draw()
                if len(rows) > 1 or len(part) == 1:  # batch norm has no statistics of a single image
                    optimizer.zero_grad()
                    x = task.normalize(_prepared(part.x[rows], NO_POLICY, rng))
                    F.cross_entropy(model(x), part.y[rows]).backward()
                    optimizer.step()
                if progress:
                    progress("training the half-trained model", step + 1, steps)
        return ModelFunction(model).state()

    return trained_once(file, training)
