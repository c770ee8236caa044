"""What a run says, as typed models: written by the verdict, read by the report, `--fail-if`, `compare` and users.

`summary.json` holds a `Summary`; docs/reference/summary.schema.json is its JSON schema. Fields may be added; those that
are here keep their names and meaning.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict, Field, model_validator

from gradveil.certification.line_up import LineUpRisk
from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining
from gradveil.core.results import GradientChange, Rate, Record, ScoreRow, ScoreStatistics, Status, StorableText
from gradveil.core.settings import build
from gradveil.core.types import Mode
from gradveil.storage.run_folder import read_record

SCHEMA: Final = 2
MAX_DEFENSES, MAX_ROWS = 500, 10_000  # of a summary that is read
CONTROL = "none"  # the defense that changes nothing: what the attacks get there shows how strong they are

Verdict = Literal["leaks", "cannot tell", "unrefuted", "no leak shown"]  # in order of precedence
LEAKS: Final = "leaks"
CANNOT_TELL: Final = "cannot tell"
UNREFUTED: Final = "unrefuted"
NO_LEAK: Final = "no leak shown"

# What a reader must know beside a verdict; docs/verdicts.md has a section of the same name for each.
NoticeCode = Literal[
    "no-control",
    "control-does-not-leak",
    "control-leaks-little",
    "few-victims",
    "few-strangers",
    "untested-victims",
    "no-classes",
    "weak-attacks",
    "granted-more",
    "no-attack-ran",
    "attacks-failed",
    "images-failed",
    "no-updates",
    "single-draw",
    "only-rescaled",
    "seen-directly",
    "zero-updates",
    "learnt-nothing",
    "broken-updates",
    "claimed-counter",
    "unknown-counter",
]

# Why an audit cannot tell whether a defense leaks; each is explained under the notice of the same name.
Doubt = Literal[
    "no-attack-ran", "few-strangers", "control-does-not-leak", "control-leaks-little", "few-victims", "attacks-failed"
]

# Why a defense is not recommended; docs/verdicts.md explains each.
RejectionCode = Literal[
    "leaks", "cannot-tell", "weak-control", "no-counter", "few-victims", "coarse-test", "cost-not-measured", "too-costly",
    "uncertain-cost", "near-chance", "nothing-to-lose", "costs-more", "failed-again",
    "not-confirmed",
]  # fmt: skip
StepCode = Literal[
    "audit-defenses", "stronger-attacks", "more-private-images", "failed-attacks", "failed-training", "more-time",
    "complete-evidence", "tune", "no-setting-left", "differential-privacy", "larger-batches", "secure-aggregation",
    "several-updates",
]  # fmt: skip


class Notice(Record):
    """One warning."""

    code: NoticeCode
    text: StorableText


class LeakTest(Record):
    """The test behind a verdict: victims against strangers of their class."""

    statistic: float
    null_mean: float  # of the statistic, victims and strangers exchanged
    p: float
    level: float
    draws: int
    strangers: int
    untested: int  # victims whose class has no stranger
    smallest_p: float  # that this number of victims and strangers could give
    control_rate: float  # share of tested victims that are identified without a defense
    control_null: float  # the same share, victims and strangers exchanged
    power: float  # against half of the control's excess over that
    detectable: float | None  # smallest share of leaking images seen with 80% power; None: not even all

    @property
    def leaks(self) -> bool:
        return self.p <= self.level


class DirectLook(Record):
    """What can be seen of the private images in an update as it stands, without an attack."""

    p: float  # of the test, for this look alone
    seen: int  # private images that are more alike to something sent than every stranger is
    tensor: StorableText  # where most of them are seen
    reading: StorableText


class VictimsNeeded(Record):
    """How many victims an audit needs to see a leak of a share of the images with 80% power."""

    share: float
    victims: int | None  # None: more than the private images allow


class CaseFacts(Record):
    """What was attacked. Terms of an audit that have no field here are kept beside the fields."""

    model_config = ConfigDict(extra="allow")

    data: StorableText
    model: StorableText
    loss: StorableText = "cross-entropy"
    victims: int
    batch_size: int
    aggregate: int = 1  # clients, with a batch each, of which only the sum is seen
    local_steps: int
    local_lr: float | None = None  # None: one gradient is sent
    local_epochs: int = 1
    local_batch_size: int | None = None  # None: the whole batch
    local_optimizer: StorableText = "sgd"
    local_accumulate: int = 1
    mode: Mode = "train"
    frozen: tuple[StorableText, ...] = ()
    sends_statistics: bool = False
    weights: StorableText | None = None
    trained_rounds: int
    trained_epochs: int
    updates: int
    knowledge: str
    budget: str
    seed: int
    input_shape: tuple[int, int, int]
    num_classes: int
    class_names: tuple[StorableText, ...]
    mean: tuple[float, ...] = ()  # per channel, taken off the pixels before they enter the network
    std: tuple[float, ...] = ()

    @property
    def training(self) -> LocalTraining:
        """What a client did in a round."""
        values = {
            "epochs": self.local_epochs,
            "batch_size": self.local_batch_size,
            "lr": self.local_lr,
            "optimizer": self.local_optimizer,
            "mode": self.mode,
            "accumulate": self.local_accumulate,
            "frozen": self.frozen,
            "sends_statistics": self.sends_statistics,
        }
        return build(LocalTraining, values, of="local training")


class AttackRow(ScoreRow):
    """One attack on one defense, scored against one truth."""

    spec: StorableText
    status: Status
    adaptive: bool  # it is built against this defense or a part of it, and accepted as such
    claimed: bool = False  # an author calls it a counter of this defense
    knowledge: str
    updates: int  # of each batch, as the server saw them
    seconds: float | None
    iterations: int | None
    error: StorableText | None
    cell: str  # key of the stored cell

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class VictimWorst(Record):
    """One private image, under the attack that got most of it."""

    victim: int
    image: int
    attack: StorableText
    psnr: float | None
    ssim: float | None
    identified: bool | None


class Worst(ScoreStatistics):
    """Over all images, each under the attack that got most of it."""

    identified: Rate
    attacks: int
    by_victim: tuple[VictimWorst, ...]


class UtilityRow(Record):
    """What the defense costs in federated training. Accuracies are means over seeds, of the last rounds of each."""

    acc_test: float | None
    acc_train: float | None
    acc_sensitive: float | None  # on the images of the defended clients
    seconds_per_round: float | None
    pdm: float | None  # percent of the undefended test accuracy that is lost
    std: float | None = None  # of that loss over seeds, each against the undefended training of the same seed
    low: float | None = None  # 95% interval of the loss; None: one seed
    high: float | None = None
    overhead: float | None  # time of a round against the undefended one
    acc_absent: float | None = None  # undefended, without the clients that would be defended; None: there are no others
    model: StorableText
    audited_model: bool
    audited_updates: bool  # a client computes what it sends as in the audit, from as many images
    scope: StorableText  # how it was trained
    seeds: int
    rounds: int
    lr: float
    server_lr: float  # FedSGD multiplies both learning rates
    tried: tuple[float, ...] = (1.0,)  # the server's learning rates; the best on validation images was chosen


class DefenseRow(Record):
    """One defense: its verdict, what the attacks got, and what it costs."""

    spec: StorableText
    stage: tuple[StorableText, ...]
    counter: tuple[StorableText, ...]  # attacks that are built to break it or a part of it
    claimed: tuple[StorableText, ...] = ()  # attacks that only an author calls so
    scope: StorableText
    verdict: Verdict
    doubts: tuple[Doubt, ...] = ()  # why the audit cannot tell
    test: LeakTest | None  # None: no attack ran
    look: DirectLook | None = None  # None: it was not looked at
    line_up: LineUpRisk | None = None  # None: there was none; it has no part in the verdict
    warnings: tuple[Notice, ...]
    utility: UtilityRow | None
    gradient: GradientChange | None
    attacks: tuple[AttackRow, ...]
    worst: Worst | None

    @model_validator(mode="after")
    def _consistent(self) -> DefenseRow:
        if (self.verdict == CANNOT_TELL) != bool(self.doubts):
            raise ValueError("doubts are named where the verdict is `cannot tell`, and only there")
        if self.control and self.verdict not in (LEAKS, CANNOT_TELL):
            raise ValueError(f"the control either leaks or nothing can be told, but its verdict is `{self.verdict}`")
        return self

    @property
    def control(self) -> bool:
        return self.spec == CONTROL

    @property
    def ranked(self) -> list[AttackRow]:
        """The attacks scored against the originals, strongest first; those that did not run are last."""
        rows = [row for row in self.attacks if row.against == "original"]
        return sorted(rows, key=lambda row: (row.ok, row.strength), reverse=True)

    @property
    def best(self) -> AttackRow | None:
        """The single attack that got most."""
        return next((row for row in self.ranked if row.ok), None)

    @property
    def left_out(self) -> list[str]:
        """Attacks that are built to break it and were no part of the audit."""
        tried = {row.spec.partition(":")[0] for row in self.attacks}
        return [name for name in self.counter if name not in tried]

    @property
    def accuracy(self) -> float | None:
        return self.utility.acc_test if self.utility else None

    @property
    def loss(self) -> float | None:
        return self.utility.pdm if self.utility else None

    @property
    def most_lost(self) -> float | None:
        """The upper end of the interval of the loss; the loss itself where there is none."""
        return self.utility.high if self.utility and self.utility.high is not None else self.loss

    @property
    def overhead(self) -> float | None:
        return self.utility.overhead if self.utility else None

    @property
    def cosine(self) -> float | None:
        return self.gradient.cosine if self.gradient else None


class Rejection(Record):
    """One audited defense that is not recommended, with every reason."""

    spec: StorableText
    reasons: tuple[RejectionCode, ...]


class NextStep(Record):
    """What to do next, and why."""

    code: StepCode
    reason: StorableText
    command: StorableText | None  # None: no command does it, or the audit was of Python objects


class Recommendation(Record):
    """The defense to take, if the evidence suffices for one; docs/verdicts.md states the rules."""

    defense: StorableText | None
    max_loss: float  # percent of the undefended accuracy that it may lose
    rejected: tuple[Rejection, ...]
    next_steps: tuple[NextStep, ...]

    @property
    def candidates(self) -> list[str]:
        """Defenses under which no leak was shown, and of which no reason but missing evidence speaks against them."""
        final = {"leaks", "cannot-tell", "too-costly", "near-chance", "costs-more", "failed-again"}
        return [rejection.spec for rejection in self.rejected if not final & set(rejection.reasons)]


class Summary(Record):
    """The whole of `summary.json`."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[2] = Field(default=SCHEMA, alias="schema")
    gradveil: str
    suite: StorableText
    command: StorableText | None  # None: the audit was of Python objects
    scope: StorableText
    case: CaseFacts
    granted: tuple[StorableText, ...]
    not_tested: tuple[StorableText, ...]
    warnings: tuple[Notice, ...]
    victims_needed: tuple[VictimsNeeded, ...]
    defenses: tuple[DefenseRow, ...]
    baseline: ScoreRow | None  # what an adversary gets with no update at all
    cost_left_out: float | None = None  # CPU seconds that measuring the cost would take, where there was no time for it
    recommendation: Recommendation

    @model_validator(mode="after")
    def _consistent(self) -> Summary:
        advice = self.recommendation
        audited = [defense.spec for defense in self.defenses if not defense.control]
        advised = [rejected.spec for rejected in advice.rejected] + ([advice.defense] if advice.defense is not None else [])
        if sorted(audited) != sorted(advised):
            raise ValueError("each audited defense is either recommended or rejected")
        if advice.defense is not None and self.recommended is None:
            raise ValueError(f"{advice.defense} is recommended, but its verdict is not `{NO_LEAK}`")
        return self

    @classmethod
    def read(cls, folder: Path) -> Summary:
        """The summary of a stored run, or one clear line."""
        file = folder / "summary.json"
        if not os.path.isfile(file):  # also where the path is too long to be one
            raise UserError(f"{folder} has no summary.json, so it is not a finished run; `gradveil audit --out DIR` makes one.")
        version = read_record(file, _Version, "run the audit again").schema_version
        if version != SCHEMA:
            raise UserError(
                f"{file} has schema {version}, this version reads schema {SCHEMA}. "
                + ("Run the audit again." if version < SCHEMA else "Update gradveil.")
            )
        summary = read_record(file, cls, "run the audit again")
        if len(summary.defenses) > MAX_DEFENSES or sum(len(d.attacks) for d in summary.defenses) > MAX_ROWS:
            raise UserError(f"{file}: more than {MAX_DEFENSES:,} defenses or {MAX_ROWS:,} rows, which no audit makes.")
        return summary

    @property
    def control(self) -> DefenseRow | None:
        return next((d for d in self.defenses if d.control), None)

    @property
    def recommended(self) -> DefenseRow | None:
        """The defense to take."""
        return next((d for d in self.defenses if d.spec == self.recommendation.defense and d.verdict == NO_LEAK), None)

    @property
    def attacks(self) -> list[str]:
        """Every attack that was to run, once, in the order of the summary."""
        return list(dict.fromkeys(row.spec for d in self.defenses for row in d.attacks))


class _Version(Record):
    schema_version: int = Field(alias="schema")
