"""What each kind of cell computes. The same case and key give the same numbers in any process."""

import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from gradveil.attacks.base import Attack, Target
from gradveil.attacks.budget import row_bytes
from gradveil.attacks.lineup import LineUp
from gradveil.attacks.unit_length import least_agreement
from gradveil.auditing.case import Case
from gradveil.auditing.cost import CURVES, CostTrainings
from gradveil.auditing.device import OnDevice, moved, returned
from gradveil.auditing.limits import CPU, NO_LIMITS, Limits, out_of_memory
from gradveil.auditing.line_up import draw_line_ups, ranks
from gradveil.auditing.plan import Cell
from gradveil.auditing.spec import CONTROL
from gradveil.auditing.utility import CLIENTS, IMAGES
from gradveil.auditing.work import Work, one_thread
from gradveil.client import Client, prepare_client, summed_round
from gradveil.core.errors import UserError, one_line
from gradveil.core.gradients import ModelFunction
from gradveil.core.loops import run_by
from gradveil.core.observation import Observation, Reconstruction, Sighting, Trace, observe
from gradveil.core.progress import Steps
from gradveil.core.randomness import TorchStream, generator, seeded
from gradveil.core.results import Against, ImageScores, finite
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors, Update, widened
from gradveil.core.update_change import mean_change, update_change
from gradveil.defenses.base import Defense, Setup
from gradveil.federation import FederationPlan, central_plan, train, train_central
from gradveil.federation.evaluate import evaluate
from gradveil.metrics import Scores, baseline, batch_numbers, likeness_table, score_all, summarize
from gradveil.metrics.direct_look import direct_look
from gradveil.processes.scheduler import OutOfMemory
from gradveil.storage.files import DiskFull
from gradveil.storage.resumable import Checkpoints
from gradveil.storage.run_folder import Damaged, Outcome, RunFolder, StoredCell

FEW_PUBLIC = 200  # public images of a line-up for which memory is short


def run_cell(cell: Cell, case: Case, folder: RunFolder, progress: Steps, limits: Limits = NO_LIMITS) -> StoredCell:
    """Compute a cell and store it. An error is stored in its place, and the other cells go on.

    A first try that runs out of memory raises `OutOfMemory`, and nothing is stored.
    """
    blocked = next((needed for key in cell.needs if (needed := folder.outcome(key)).status != "ok"), None)
    if blocked:
        return folder.write(cell, Outcome(status=blocked.status, error=blocked.error, traceback=blocked.traceback))
    begun, cpu = time.perf_counter(), time.process_time()
    try:
        with _checkpoints(cell, case, folder, limits):
            outcome, tensors = compute(Work(cell, case, folder, progress, limits))
        seconds = time.perf_counter() - begun if outcome.seconds is None else outcome.seconds
        outcome = outcome.model_copy(update={"seconds": seconds, "cpu_seconds": time.process_time() - cpu})
        return folder.write(cell, outcome, tensors)
    except (DiskFull, Damaged):  # nothing can be stored, or a needed cell was damaged since the audit began
        raise
    except UserError as error:  # the method does not fit this case
        return folder.write(cell, Outcome(status="not applicable", error=str(error)))
    except (Exception, SystemExit) as error:  # a user's model may do anything
        if out_of_memory(error) and not limits.second_try:
            raise OutOfMemory(str(error)) from None
        line = f"{type(error).__name__}: {one_line(error)}"
        return folder.write(cell, Outcome(status="failed", error=line[:300], traceback=traceback.format_exc()))


@contextmanager
def _checkpoints(cell: Cell, case: Case, folder: RunFolder, limits: Limits) -> Iterator[None]:
    """Let a long search go on where it was when the audit was stopped.

    Its states are images, so there are none where no images may be stored.
    """
    if cell.kind != "attack" or case.spec.pictures == "none" or limits.device != CPU:
        yield
        return
    checkpoints = Checkpoints(folder.checkpoint(cell.key))
    try:
        with run_by(checkpoints):
            yield
    except (Exception, SystemExit) as error:
        if not isinstance(error, DiskFull) and not out_of_memory(error):
            checkpoints.remove()  # it would fail again
        raise
    checkpoints.remove()


Result = tuple[Outcome, Tensors | None]


def compute(work: Work) -> Result:
    """What a cell comes to, and the tensors that are stored with it."""
    cell, seed = work.cell, work.case.spec.seed
    # A method that draws from torch's global stream must not depend on what ran before it in this process.
    with one_thread(), seeded(seed, cell.kind, cell.defense, cell.attack):
        return _COMPUTE[cell.kind](work)


# -- observe: what the clients send ----------------------------------------------------------------------------------


def _observe(work: Work, *, everything: bool = False) -> Result:
    """The updates of all victims, with what only the judge knows: the images fed and the secrets.

    These are left out where no pictures are to be stored, unless `everything` is asked for.
    """
    private = everything or work.case.spec.pictures != "none"
    case, defense = work.case, work.defense
    task, state = case.task(defense, work.attack, work.needed("train"))
    client = _client(work, task, state, defense)
    # The same victims without a defense, on the same weights as far as the defense kept them.
    none = case.defenses[CONTROL]
    plain, plain_state = case.task(none, work.attack, state)
    undefended = _client(work, plain, plain_state, none)
    stored: Tensors = {}
    changes, agreements, zero_updates, broken_updates = [], list[float](), 0, 0
    for v in range(case.spec.victims):
        batch, number = case.batch(v), case.spec.skip_victims + v  # fresh victims have draws of their own too
        protected, data_secrets = client.protect(state, batch, number)
        for u in range(case.spec.updates):
            with seeded(case.spec.seed, number, u, "dropout"):
                update, trace = summed_round(client, state, batch, protected, case.spec.batch_size, number, u)
            stored |= {f"{v}/{u}/update/{n}": t for n, t in {**update.tensors, **update.others}.items()}
            if private:
                stored |= {f"{v}/{u}/secret/{n}": t for n, t in {**data_secrets, **trace.secrets}.items()}
                stored |= {f"{v}/{u}/fed/x": trace.fed.x, f"{v}/{u}/fed/y": trace.fed.y}
            numbers = [widened(t) for t in update.tensors.values()]
            zero_updates += not any(bool(t.any()) for t in numbers)
            broken_updates += not all(bool(t.isfinite().all()) for t in numbers)
            if u == 0:
                with seeded(case.spec.seed, number, u, "dropout"):  # the same units are dropped
                    reference, _ = summed_round(undefended, plain_state, batch, batch, case.spec.batch_size, number, u)
                changes.append(update_change(update.tensors, reference.tensors))
                agreements.append(least_agreement(update.tensors, reference.tensors))
        work.progress(v + 1, case.spec.victims)
    outcome = Outcome(
        gradient=mean_change(changes),
        changes=tuple(changes),
        agreement=min(agreements),
        zero_updates=zero_updates,
        broken_updates=broken_updates,
    )
    return outcome, stored


def _client(work: Work, task: Task, state: Tensors, defense: Defense) -> Client:
    case = work.case
    setup = Setup(task, state, case.data.private, case.public, case.spec.seed, work.folder.cache, work.stage)
    return prepare_client(defense, case.training, setup)


# -- attack: what can be rebuilt -------------------------------------------------------------------------------------


def _attack(work: Work) -> Result:
    case, attack = work.case, work.attack
    assert attack is not None
    tampering = attack if type(attack).tamper is not Attack.tamper else None
    task, state = case.task(work.defense, tampering, work.needed("train"))
    observations, traces = _observations(work, task, state)
    for observation in observations:
        attack._check(observation)
    answers = _run_attack(work, attack, observations)
    originals = work.batches
    # An answer that is not finite counts as failed and is scored as mid-grey.
    images = [torch.full_like(r.images, math.nan) if r.failed else r.images for r in answers]
    scores = _scored(case, originals, images)
    rows = [summarize(scores, label_accuracy=_label_accuracy(originals, answers))]
    shown = [torch.nan_to_num(i[s.order], nan=0.5) for i, s in zip(images, scores, strict=True)]
    tensors = {"original": torch.stack([b.x for b in originals]), "reconstruction": torch.stack(shown)}
    fed = [t.fed for t in traces]
    if all(f.x.shape == b.x.shape for f, b in zip(fed, originals, strict=True)):
        tensors["fed"] = torch.stack([f.x for f in fed])
        if not torch.equal(tensors["fed"], tensors["original"]):
            fed_scores = _scored(case, fed, images, "fed")
            rows.append(summarize(fed_scores, label_accuracy=_label_accuracy(fed, answers)))
    failures = [r.failed for r in answers if r.failed]
    outcome = Outcome(
        status="failed" if len(failures) == len(answers) else "ok",
        error=failures[0] if failures else None,
        rows=tuple(rows),
        victims=tuple(_by_image(originals, scores, answers)),
        likeness=_likeness(case, images),
        history={k: tuple(finite(v) for v in values) for k, values in answers[0].history.items()},
        seconds=sum(r.seconds for r in answers),
        iterations=max(r.iterations for r in answers),
        granted=tuple(observations[0].knowledge.granted()),
    )
    return outcome, None if case.spec.pictures == "none" else tensors


def _scored(case: Case, truth: Sequence[Batch], images: list[Tensor], against: Against = "original") -> list[Scores]:
    classes = [case.classes(batch) for batch in truth]
    return score_all([b.x for b in truth], classes, images, pool=case.distractors, against=against)


def _likeness(case: Case, images: Sequence[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Per batch the likenesses that the test needs: of all victims and strangers whose class stands in the batch."""
    table = likeness_table(torch.cat(list(images)).cpu(), batch_numbers(images), case.tested.x)
    return _used(case, table)


def _used(case: Case, table: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(s, 6) for s in row[used].tolist()) for row, used in zip(table, case.slots.used, strict=True))


def _run_attack(work: Work, attack: Attack, observations: list[Observation]) -> list[Reconstruction]:
    """Run the attack within the limits, on their device."""
    spec, limits = work.case.spec, work.limits
    memory = limits.memory
    if limits.second_try:
        whole = Target(observations, torch.zeros(len(observations), spec.images), TorchStream(), memory=memory)
        rows = min(whole.rows_at_once, len(observations) * attack.cost(whole.workload).rows)
        memory = row_bytes(whole.workload) * rows // 2
    run = partial(attack, seed=spec.seed, budget=spec.budget, progress=work.progress, memory=memory, cache=work.folder.cache)
    if limits.device == CPU:
        return run(observations)
    with OnDevice(limits.device):
        return returned(run(moved(observations, limits.device)))


def _observations(work: Work, task: Task, state: Tensors) -> tuple[list[Observation], list[Trace]]:
    """The stored updates as the adversary sees them, and the traces that only the judge reads."""
    case, stored = work.case, work.needed("observe")
    assert stored is not None
    if case.spec.pictures == "none":  # the images were not stored; the same seeds give the same ones
        stored = {**(_observe(work, everything=True)[1] or {}), **stored}
    parts, training = _parts(stored), case.training
    observations, traces = [], []
    for v, batch in enumerate(work.batches):
        draws = [parts[v, u] for u in range(case.spec.updates)]
        # Secrets of later updates get the number of the update behind their name.
        secrets = {n + (f"@{u}" if u else ""): t for u, d in enumerate(draws) for n, t in d.get("secret", {}).items()}
        trace = Trace(batch, Batch(draws[0]["fed"]["x"], draws[0]["fed"]["y"]), secrets)
        sent = [Update(d.get("update", {}), training.kind, len(batch)) for d in draws]
        observation = observe(
            task,
            [Sighting(state, update) for update in sent],
            level=case.spec.knowledge,
            training=case.seen_training,
            defense=work.defense,
            public=case.public,
            trace=trace,
            aggregate=case.spec.aggregate,
        )
        observations.append(observation)
        traces.append(trace)
    return observations, traces


def _parts(stored: Tensors) -> dict[tuple[int, int], dict[str, Tensors]]:
    """The tensors of an observe cell by victim and draw, then by what they are."""
    parts: dict[tuple[int, int], dict[str, Tensors]] = {}
    for path, tensor in stored.items():
        victim, draw, part, name = path.split("/", 3)
        parts.setdefault((int(victim), int(draw)), {}).setdefault(part, {})[name] = tensor
    return parts


def _label_accuracy(truth: Sequence[Batch], answers: Sequence[Reconstruction]) -> float | None:
    """The share of correct labels. An update does not tell their order, so only their counts are compared."""
    if any(r.labels is None or r.labels.ndim == 2 for r in answers):  # rows of targets are not counted
        return None
    pairs = [(b.hard_labels, r.labels) for b, r in zip(truth, answers, strict=True) if r.labels is not None]
    right = sum((Counter(labels.tolist()) & Counter(guess.tolist())).total() for labels, guess in pairs)
    return right / sum(len(b) for b in truth)


def _by_image(originals: Sequence[Batch], scores: Sequence[Scores], answers: Sequence[Reconstruction]) -> Iterator[ImageScores]:
    for v, (batch, score, answer) in enumerate(zip(originals, scores, answers, strict=True)):
        guesses = answer.labels if answer.labels is not None and answer.labels.ndim == 1 else None
        for i in range(len(batch)):
            yield ImageScores(
                victim=v,
                image=i,
                psnr=_number(score.psnr, i),
                ssim=_number(score.ssim, i),
                mse=_number(score.mse, i),
                lpips=_number(score.lpips, i),
                others={name: _number(values, i) for name, values in score.others.items()},
                identified=None if score.identified is None else bool(score.identified[i]),
                rank=None if score.rank is None else int(score.rank[i]),
                likeness=_number(score.likeness, i),
                nearest=_number(score.nearest, i),
                failed=bool(score.failed[i]),
                label=int(batch.y[i]) if batch.y.ndim == 1 else None,
                label_guess=None if guesses is None else int(guesses[score.order[i]]),
            )


def _number(values: Tensor | None, place: int) -> float | None:
    return None if values is None else finite(float(values[place]))


# -- look: what can be seen without an attack ------------------------------------------------------------------------


def _look(work: Work) -> Result:
    """Compare all that is sent with the images as it stands."""
    case, stored = work.case, work.needed("observe")
    assert stored is not None
    _, state = case.task(work.defense, None, work.needed("train"))
    parts, updates = _parts(stored), range(case.spec.updates)
    sent = [[parts.get((v, u), {}).get("update", {}) for u in updates] for v in range(case.spec.victims)]
    table, sights = direct_look(sent, state, case.tested.x, case.slots, work.progress)
    return Outcome(likeness=_used(case, table), sights=tuple(sights)), None


# -- line-up: which of many images was in the batch -------------------------------------------------------------------


def _line_up(work: Work) -> Result:
    """Compare the update that each candidate would cause with what was sent."""
    case, defense = work.case, work.defense
    observations, _ = _observations(work, *case.task(defense, None, work.needed("train")))
    candidates, places = draw_line_ups(case)
    method = LineUp(public_images=FEW_PUBLIC) if work.limits.second_try else LineUp()
    scores = method.scores(observations, candidates, progress=work.progress, cache=work.folder.cache)
    return Outcome(ranks=ranks(scores, places)), None


# -- baseline: what is known without an update -----------------------------------------------------------------------


def _baseline(work: Work) -> Result:
    """The mean public image of the class, which an adversary that has read the label can always show."""
    case, guesses = work.case, []
    for batch in work.batches:
        if case.public is None:
            guesses.append(torch.full_like(batch.x, 0.5))
        elif case.data.public_from is not None:  # other classes
            guesses.append(baseline(case.public, None, len(batch)))
        else:
            guesses.append(baseline(case.public, batch.y))
    return Outcome(rows=(summarize(_scored(case, work.batches, guesses)),)), None


# -- train and utility: federated training under the defense -----------------------------------------------------------


def _train(work: Work) -> Result:
    """The state in which the model is attacked, trained under the same defense."""
    case, spec = work.case, work.case.spec
    if spec.trained_epochs:
        plan, cache = central_plan(spec.trained_by, spec.trained_epochs, spec.seed), work.folder.cache
        training = partial(train_central, loss=case.loss, cache=cache, progress=work.stage)
        state = training(case.server, case.training_data, work.defense, plan)
        return Outcome(history={"acc_test": (_accuracy(case, work.defense, state),)}), state
    data = case.training_data
    clients = min(CLIENTS, len(data.private))
    images = min(IMAGES // CLIENTS, len(data.private) // clients)
    federation = FederationPlan(rounds=spec.trained_rounds, clients=clients, images_per_client=images, seed=spec.seed)
    folder, loss = work.folder.cache, spec.loss
    history = train(case.server, data, work.defense, federation, loss=loss, cache=folder, progress=work.stage)
    return Outcome(history={name: tuple(getattr(history, name)) for name in CURVES}), history.state


def _accuracy(case: Case, defense: Defense, state: Tensors) -> float | None:
    """Of a trained state on the test part, as a server evaluates it; None where targets are no classes."""
    task, _ = case.task(defense, None, state)
    evaluated = case.data.task(ModelFunction(task.model.module, case.loss))
    correct, _ = evaluate(evaluated, state, case.data.test, generator(case.spec.seed, "evaluate"))
    return finite(float(correct.double().mean()))


def _utility(work: Work) -> Result:
    training = work.case.spec.utility
    assert training is not None
    return CostTrainings(work, training).run(), None


_COMPUTE: dict[str, Callable[[Work], Result]] = {
    "baseline": _baseline,
    "train": _train,
    "observe": _observe,
    "attack": _attack,
    "look": _look,
    "line-up": _line_up,
    "utility": _utility,
}
