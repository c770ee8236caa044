"""The adversary as a client: a copy of the defense, run on public images, shows which updates come from which images.

The only assumption about the defense is that it can be run, so a user's class serves as well as a published one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gradveil.attacks.base import Target
from gradveil.client import Client, prepare_client
from gradveil.core.loops import Loop
from gradveil.core.observation import Knowledge, Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Defense, Setup
from gradveil.defenses.update.none import NoDefense

ALLOWANCE = {"quick": 4e10, "standard": 8e10, "thorough": 2e11}  # work of all rehearsals, about a nanosecond each
CALL = 2e4  # cost of one operation, however small its tensors
MOST = {"quick": 2_000, "standard": 3_000, "thorough": 6_000}  # images
ENOUGH = 100  # rehearsals below which the undefended client is rehearsed in place of the defended one


Kwargs = dict[str, object]


@dataclass
class Rehearsal:
    """Updates of public batches (rows first), the images and labels behind them, and whether they were defended."""

    updates: Tensors
    x: Tensor  # rounds × B × C × H × W, pixels
    y: Tensor  # rounds × B
    defended: bool


def fits(observation: Observation) -> str | None:
    """Why public images cannot replace private ones, or None if they can."""
    public = observation.knowledge.public
    if public is None or tuple(public.x.shape[1:]) != tuple(observation.task.input_shape):
        return "the public images are not of the kind that the network takes"
    needed = max(8, 2 * observation.knowledge.batch_size)
    return None if len(public) >= needed else f"it needs at least {needed} public images"


def public_batch(target: Target) -> Batch:
    """The public images in random order; labels of a borrowed set that the model does not have are spread evenly."""
    public = target.knowledge.public
    assert public is not None
    order = torch.randperm(len(public), generator=generator("rehearsal"))
    x, y = public.x[order], public.hard_labels[order]
    if int(y.max()) >= target.task.num_outputs:
        y = torch.arange(len(x)) % target.task.num_outputs
    return Batch(x, y)


def copy_of_client(target: Target, public: Batch | None, defense: Defense | None = None) -> Client:
    """A client that holds the public images (one grey image where there are none) and defends them as the victims do."""
    grey = Batch(torch.full((1, *target.task.input_shape), 0.5), torch.zeros(1).long())
    private = public if public is not None and len(public) else grey
    seed = generator("rehearsal", "client").initial_seed() % 2**31
    setup = Setup(target.task, target.state, private, public, seed, target.cache)
    return prepare_client(defense or defense_of(target.knowledge), target.training, setup)


def defense_of(knowledge: Knowledge) -> Defense:
    """The defense, as something that can be run."""
    return knowledge.defense if isinstance(knowledge.defense, Defense) else NoDefense()


class _Work(TorchDispatchMode):
    """Counts the work of a block: calls, numbers written, multiply-adds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(
        self, func: OpOverload[..., object], types: object, args: tuple[object, ...] = (), kwargs: Kwargs | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        self.total += CALL + sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        flops = flop_registry.get(func._overloadpacket)
        self.total += flops(*args, **(kwargs or {}), out_val=out) / 2 if flops else 0
        return out


def cost_of_round(client: Client, state: Tensors, batch: Batch) -> float:
    """The work of one round. Counted, not timed: the number of rehearsals must not depend on the machine."""
    counter = _Work()
    with counter:
        client.round(state, batch, "cost")
    return counter.total


def rehearse(target: Target) -> Rehearsal:
    """As many rounds on public batches as the budget allows."""
    public, size = public_batch(target), target.knowledge.batch_size
    client, defended = copy_of_client(target, public), True
    rounds = min(len(public), MOST[target.budget]) // size
    cost = cost_of_round(client, target.state, public[:size])
    if rounds > ENOUGH > ALLOWANCE[target.budget] / cost:
        client, defended = copy_of_client(target, public, NoDefense()), False
        cost = cost_of_round(client, target.state, public[:size])
    rounds = max(4, min(rounds, int(ALLOWANCE[target.budget] / cost)))
    sent: dict[str, list[Tensor]] = {}
    for i in Loop(rounds, shared=True):
        update, _ = client.round(target.state, public[i * size : (i + 1) * size], i)
        for name in target.model.trainable:
            tensor, kind = update.tensors[name], target.state[name].dtype
            sent.setdefault(name, []).append(tensor.to(torch.promote_types(tensor.dtype, kind)))  # it may be half
        if target.progress:
            target.progress(i + 1, rounds)
    used = public[: rounds * size]
    return Rehearsal(
        {name: torch.stack([rows[i % len(rows)] for i in range(rounds)]) for name, rows in sent.items()},
        used.x.unflatten(0, (rounds, size)),
        used.y.unflatten(0, (rounds, size)),
        defended,
    )
