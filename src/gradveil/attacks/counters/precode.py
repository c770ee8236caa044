"""Against PRECODE: the bottleneck hides what comes after it, not what comes before.

* `precode-signal`: the encoder is a fully connected layer with a bias, so for one image its gradients give the features
  before it and the signal at them exactly, whatever noise was sampled. Where the layers before are a plain line of
  invertible ones, the image follows in closed form; otherwise they are matched with the true signal.
* `precode-latent`: only the exact features are used: the image that has them.
* `precode-ignore` (Scheliga et al. 2023): everything after the bottleneck's encoder is left out of the match.

In batches, `precode-signal` reads the first fully connected layer apart, where it lies before the bottleneck and meets a ReLU.
The encoder meets none: its signals are not sparse, and a batch cannot be read there.

On nets that begin with a fully connected layer the image is that layer's exact input; `precode-signal` reads it there.
"""

from pydantic import Field

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.analytic.linear import Linear
from gradveil.attacks.analytic.rgap import RGAP
from gradveil.attacks.layers import linear_layers
from gradveil.attacks.matching.distances import Nothing
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.features import FeatureInversion
from gradveil.attacks.matching.head import FeatureMatch, reduce_to_head
from gradveil.attacks.matching.optimizers import LBFGS
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Insight, Match, Problem
from gradveil.attacks.matching.starts import Start
from gradveil.attacks.matching.swift import Swift, SwiftCounter
from gradveil.core.observation import Observation
from gradveil.defenses.model.precode import Precode

INVERSION = FeatureInversion()


def bottleneck_path(observation: Observation) -> str | None:
    """The first submodule with an encoder, a decoder and a draw: PRECODE's, recognised by its parts."""
    for path, part in observation.model.module.named_modules():
        if all(hasattr(part, name) for name in ("encoder", "decoder", "draw")):
            return str(path)
    return None


def _no_bottleneck(observation: Observation) -> str | None:
    return None if bottleneck_path(observation) is not None else "the model has no variational bottleneck"


@attack("precode-signal", against=(Precode,), version=6)
class PrecodeSignal(SwiftCounter):
    """Exact features and exact signal at the encoder, then the layers before it.

    Single images of all networks; batches where the first fully connected layer is not the encoder and meets a ReLU.

    Example: gradveil audit --defense precode --attack precode-signal
    """

    def applies(self, observation: Observation) -> str | None:
        if observation.knowledge.batch_size == 1:
            exact = observation.update.kind == "gradient"
            return _no_bottleneck(observation) or (None if exact else "the encoder is exact for one gradient")
        if why := _no_bottleneck(observation) or INVERSION.applies(observation):
            return why
        hidden = not linear_layers(observation)[0].startswith(f"{bottleneck_path(observation)}.")
        return None if hidden else "no fully connected layer comes before the encoder, which is exact for single images"

    def run(self, target: Target) -> Answer:
        if target.knowledge.batch_size > 1:
            return INVERSION.run(target)
        for closed in (Linear(), RGAP()):
            if closed.applies(target.first) is None:
                return closed.run(target)
        head = reduce_to_head(target, f"{bottleneck_path(target.first)}.encoder")
        return Swift().reconstruct(target) if head is None else _relabelled(Swift().reconstruct(head.target), target)


@attack("precode-latent", against=(Precode,), version=3)
class PrecodeLatent(Attack):
    """The image whose features are those that the encoder's gradients give away.

    Args: steps: iterations of L-BFGS; tv: weight of total variation.
    Example: gradveil audit --defense precode --attack precode-latent
    """

    steps: int = Field(default=300, ge=1)
    tv: float = Field(default=1e-2, ge=0)

    def cost(self, work: Workload) -> Cost:
        return Cost(LBFGS().expected_evaluations(self.steps))

    def applies(self, observation: Observation) -> str | None:
        single = observation.knowledge.batch_size == 1
        return PrecodeSignal().applies(observation) if single else "the encoder is exact for single images"

    def run(self, target: Target) -> Answer:
        head = reduce_to_head(target, f"{bottleneck_path(target.first)}.encoder")
        if head is None:  # the encoder's input is the image itself, or its gradients were changed
            return PrecodeSignal().run(target)
        priors = (FeatureMatch(head.features), TV(self.tv, "smoothed"))
        solution = solve(Problem(head.target, Match(Nothing(), priors, LBFGS(), self.steps, Start(scale=0.1))))
        return _relabelled(Answer(solution.x, solution.value, iterations=solution.iterations), target)


@attack("precode-ignore", against=(Precode,), version=2)
class PrecodeIgnore(SwiftCounter):
    """Match only the layers up to the bottleneck's encoder.

    Example: gradveil audit --defense precode --attack precode-ignore
    """

    search = Swift(restarts=0, cycles=0, adam_steps=0)

    def applies(self, observation: Observation) -> str | None:
        return _no_bottleneck(observation)

    def insight(self, target: Target) -> Insight:
        path, names = bottleneck_path(target.first), target.model.trainable
        return Insight(keep=names[: next(i for i, n in enumerate(names) if n.startswith(f"{path}.decoder"))])


def _relabelled(answer: Answer, target: Target) -> Answer:
    """The reduced problem has no classes; the labels are those read from the update."""
    return Answer(answer.x, answer.score, target.labels, answer.iterations, answer.history)
