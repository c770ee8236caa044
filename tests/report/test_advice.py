"""Which defense is recommended, why the others are not, and what the reader is told to do next."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from advised import method
from pydantic import model_validator
from test_words import TEST, TRAINED, defense, row

from gradveil.auditing import advice
from gradveil.auditing.advice import Evidence, advise
from gradveil.auditing.spec import AuditSpec, make_spec
from gradveil.auditing.tuning.spec import TuneSpec
from gradveil.cli import audit as audit_command
from gradveil.cli import tune as tune_command
from gradveil.cli.options import parser_of
from gradveil.core.errors import UserError
from gradveil.summary import DefenseRow, NextStep, Recommendation, VictimsNeeded

NEEDED = [VictimsNeeded(share=0.1, victims=40), VictimsNeeded(share=0.25, victims=20), VictimsNeeded(share=0.5, victims=3)]


def worst(images: int) -> dict[str, Any]:
    rate = {"rate": 0.0, "low": 0.0, "high": 0.2, "chance": 0.001}
    return {"identified": rate, "scored": images, "attacks": 1, "by_victim": []}


def held(spec: str, loss: float | None = 2.0, verdict: str = "no leak shown", **fields: Any) -> DefenseRow:
    """A defense against which nothing speaks, but for what a test changes."""
    attacks = [row("counter", adaptive=verdict == "no leak shown")]
    return defense(spec, verdict, loss, **{"attacks": attacks, "worst": worst(16), **fields})


def control(**test: Any) -> DefenseRow:
    return defense("none", "leaks", 0.0, test=TEST | test)


def advised(*rows: DefenseRow, **settings: Any) -> Recommendation:
    spec = AuditSpec(**{"victims": 16, "defenses": [r.spec for r in rows if method(r.spec).name], **settings})
    return advise(Evidence(spec, rows, {r.spec: method(r.spec) for r in rows}, NEEDED, 10, 2500))


def reasons(recommendation: Recommendation) -> dict[str, tuple[str, ...]]:
    return {rejected.spec: rejected.reasons for rejected in recommendation.rejected}


def spec_of(step: NextStep) -> AuditSpec:
    """The audit or tune that a command of a step starts, read as the command line reads it."""
    assert step.command is not None
    words = shlex.split(step.command)
    assert words[0] == "gradveil" and (words[1] == "tune") == (step.code == "tune")
    command, cls = {"audit": (audit_command.command, AuditSpec), "tune": (tune_command.command, TuneSpec)}[words[1]]
    options = parser_of(command).make_context(words[1], words[2:]).params
    names = {name: value for name, value in options.items() if value not in (None, [], ())}
    fields = {name: value for name, value in names.items() if name in cls.model_fields}
    trainings = {name.removeprefix("utility_"): value for name, value in names.items() if name.startswith("utility_")}
    return make_spec(fields | ({"utility": trainings} if trainings else {}), cls)


# -- recommendations that were made and were wrong ----------------------------------------------------------------------


def test_noise_at_chance_accuracy_on_four_victims_is_not_recommended() -> None:
    learnt_nothing = {"acc_test": 0.17, "pdm": 2.0, "overhead": 1.0, "acc_train": None, "acc_sensitive": None}
    noise = held("gaussian:std=1.0", worst=worst(4), utility={**learnt_nothing, "seconds_per_round": None, **TRAINED})
    rows = [control(), noise]
    evidence = Evidence(AuditSpec(victims=4), rows, {r.spec: method(r.spec) for r in rows}, NEEDED, 6, 2500)
    outcome = advise(evidence)
    assert outcome.defense is None and reasons(outcome) == {"gaussian:std=1.0": ("few-victims", "near-chance")}
    enough = Evidence(AuditSpec(victims=16), [control(), held(noise.spec, utility=noise.utility)], evidence.methods, (), 6)
    assert reasons(advise(enough)) == {"gaussian:std=1.0": ("near-chance",)}, "however many victims"


def test_pure_noise_is_not_recommended() -> None:
    unmeasured = advised(control(), held("gaussian:std=1000.0", None, gradient={"cosine": 0.0, "noise_ratio": 1e6}))
    assert unmeasured.defense is None and reasons(unmeasured) == {"gaussian:std=1000.0": ("cost-not-measured",)}
    useless = advised(control(), held("gaussian:std=1000.0", 89.0))
    assert useless.defense is None and reasons(useless) == {"gaussian:std=1000.0": ("too-costly", "near-chance")}
    a_users = advised(control(), held("mine", 1.0, "unrefuted", counter=[]))
    assert a_users.defense is None and reasons(a_users) == {"mine": ("no-counter",)}


def test_two_victims_recommend_nothing() -> None:
    outcome = advised(control(), held("prune:ratio=0.9", worst=worst(2), test=TEST | {"p": 0.4, "detectable": 0.55}), victims=2)
    assert outcome.defense is None and reasons(outcome) == {"prune:ratio=0.9": ("few-victims", "coarse-test")}


def test_an_unrefuted_defense_never_beats_one_that_withstood_its_counter() -> None:
    outcome = advised(control(), held("mixup", 1.8, "unrefuted"), held("dcs2", 2.0))
    assert outcome.defense == "dcs2" and reasons(outcome) == {"mixup": ("no-counter",)}
    alone = advised(control(), held("mixup", 0.0, "unrefuted"))
    assert alone.defense is None and alone.candidates == ["mixup"]


@pytest.mark.parametrize("weak", [{"control_rate": 0.51}, {"control_rate": 0.2}])
def test_without_a_strong_control_nothing_is_recommended(weak: dict[str, float]) -> None:
    outcome = advised(control(**weak), held("dcs2"))
    assert outcome.defense is None and reasons(outcome) == {"dcs2": ("weak-control",)}
    assert [step.code for step in outcome.next_steps] == ["stronger-attacks"]
    assert advised(defense("none", "cannot tell", 0.0), held("dcs2")).defense is None
    assert advised(held("dcs2")).defense is None, "no control at all"


# -- the rules ------------------------------------------------------------------------------------------------------------


def test_the_cheapest_that_meets_all_conditions_is_recommended() -> None:
    outcome = advised(control(), held("dcs2", 5.0), held("prune", 3.0), defense("clip", "leaks", 0.1))
    assert outcome.defense == "prune" and reasons(outcome) == {"dcs2": ("costs-more",), "clip": ("leaks",)}
    assert outcome.next_steps == () and outcome.candidates == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"worst": worst(15)}, "few-victims"),
        ({"test": TEST | {"p": 0.4, "untested": 1}}, "few-victims"),
        ({"worst": None}, "few-victims"),
        ({"test": TEST | {"p": 0.4, "detectable": 0.26}}, "coarse-test"),
        ({"test": TEST | {"p": 0.4, "detectable": None}}, "coarse-test"),
        ({"attacks": [row("ig")]}, "no-counter"),
        ({"attacks": [row("counter", adaptive=True, status="failed")]}, "no-counter"),
        ({"loss": 10.1}, "too-costly"),
        ({"loss": None}, "cost-not-measured"),
    ],
)
def test_one_missing_condition_suffices_to_reject(fields: dict[str, Any], reason: str) -> None:
    assert advised(control(), held("dcs2")).defense == "dcs2"
    outcome = advised(control(), held("dcs2", **fields))
    assert outcome.defense is None and reasons(outcome) == {"dcs2": (reason,)}


def test_images_of_few_batches_do_not_suffice() -> None:
    outcome = advised(control(), held("dcs2", worst=worst(28)), victims=7, batch_size=4)
    assert reasons(outcome) == {"dcs2": ("few-victims",)}
    assert spec_of(outcome.next_steps[0]).victims == 8


def test_the_accuracy_that_may_be_lost_is_a_setting_outside_the_case() -> None:
    rows = (control(), held("dcs2", 20.0))
    assert advised(*rows).defense is None and advised(*rows, max_loss=20).defense == "dcs2"
    assert "max_loss" not in AuditSpec(max_loss=20).terms() and "--max-loss 20.0" in str(AuditSpec(max_loss=20).command())


def test_a_random_one_is_to_be_audited_on_several_updates() -> None:
    (step,) = advised(control(), held("dpsgd", warnings=[{"code": "single-draw", "text": "random"}])).next_steps
    assert step.code == "several-updates" and spec_of(step).updates == 4


# -- what to do next --------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_one_command() -> None:
    lacking = held("prune:ratio=0.9", None, "unrefuted", counter=["prune-mask"], test=TEST | {"p": 0.4, "detectable": 0.34})
    settings: dict[str, Any] = {"victims": 4, "attacks": ["linear"], "seed": 3, "model": "smlp", "trained_rounds": 2}
    outcome = advised(control(), lacking, **settings)
    (step,) = outcome.next_steps
    assert step.code == "complete-evidence" and outcome.candidates == ["prune:ratio=0.9"]
    changed = spec_of(step)
    assert changed.victims == 20 and changed.utility is not None and changed.attacks == ("linear", "prune-mask")
    same = ("seed", "model", "trained_rounds", "defenses", "batch_size")
    before = AuditSpec(**settings, defenses=["prune:ratio=0.9"])
    assert [getattr(changed, name) for name in same] == [getattr(before, name) for name in same]
    assert "20 victims, attacks that are built to break the defense (prune-mask) and the cost in accuracy" in step.reason


def test_no_evidence_is_gathered_for_what_leaks() -> None:
    rows = (control(), held("prune:ratio=0.9", None), defense("soteria", "leaks"), held("dcs2", 50.0))
    (step,) = advised(*rows).next_steps
    assert step.reason == "What is missing for prune:ratio=0.9: the cost in accuracy."
    assert spec_of(step).defenses == ("none", "prune:ratio=0.9")


def test_a_counter_that_was_left_out_of_the_suite_is_taken_back_into_it() -> None:
    lacking = held("prune:ratio=0.9", 1.0, "unrefuted", counter=["prune-mask"])
    settings: dict[str, Any] = {"victims": 32, "without": ["prune-mask", "soteria-drop"], "utility": True}
    (step,) = advised(control(), lacking, **settings).next_steps
    assert spec_of(step).without == ("soteria-drop",) and spec_of(step).attacks == ("standard",)


def test_a_cost_that_was_asked_for_and_not_measured_is_a_failed_training() -> None:
    (step,) = advised(control(), held("dcs2", None), utility=True).next_steps
    assert step.code == "failed-training" and step.command is None and "what dcs2 costs failed" in step.reason


def test_attacks_without_time_are_run_by_the_same_command() -> None:
    late = held("prune:ratio=0.9", 1.0, "unrefuted", counter=["prune-mask"], attacks=[row("prune-mask", status="not run")])
    (step,) = advised(control(), late, utility=True).next_steps
    assert step.code == "more-time" and spec_of(step) == AuditSpec(victims=16, defenses=["prune:ratio=0.9"], utility=True)


def test_local_training_stays_as_it_is_in_every_command() -> None:
    local: dict[str, Any] = {
        "mode": "eval",
        "local_epochs": 2,
        "local_batch_size": 2,
        "local_optimizer": "adam",
        "batch_size": 4,
    }
    local |= {"frozen": ["features.*", "head"], "sends_statistics": True, "local_lr": 0.003, "data": "a path/b.npz"}
    before = AuditSpec(**local, victims=16)
    for rows in (
        (control(), defense("gaussian:std=0.1", "leaks")),
        (control(control_rate=0.1), defense("prune", "cannot tell")),
    ):
        for step in advised(*rows, **local).next_steps:
            after = spec_of(step) if step.command else before
            assert [getattr(after, name) for name in local if name != "batch_size"] == [
                getattr(before, name) for name in local if name != "batch_size"
            ]


def test_a_command_that_would_be_refused_is_left_out() -> None:
    class Picky(AuditSpec):
        @model_validator(mode="after")
        def _no_cost(self) -> Picky:
            if self.utility:
                raise UserError("no cost here")
            return self

    rows = (control(), held("dcs2", None))
    outcome = advise(Evidence(Picky(victims=16), rows, {r.spec: method(r.spec) for r in rows}, NEEDED, 10, 2500))
    assert [(step.code, step.command) for step in outcome.next_steps] == [("complete-evidence", None)]


def test_too_few_victims_to_tell_ask_for_more() -> None:
    (step,) = advised(control(), defense("prune", "cannot tell", 1.0), victims=4, utility=True).next_steps
    assert step.code == "complete-evidence" and spec_of(step).victims == 20


def test_more_victims_than_the_data_has_are_not_asked_for() -> None:
    rows = [control(), held("prune", test=TEST | {"p": 0.4, "detectable": 0.4})]
    methods = {r.spec: method(r.spec) for r in rows}
    for needed, private in (([VictimsNeeded(share=0.25, victims=None)], 2500), (NEEDED, 20)):
        steps = advise(Evidence(AuditSpec(victims=16, utility=True), rows, methods, needed, 10, private)).next_steps
        assert [(step.code, step.command) for step in steps] == [("more-private-images", None)]


def test_where_all_leak_the_page_says_what_to_try() -> None:
    rows = (
        control(),
        defense("gaussian:std=0.001", "leaks", 1.0),
        defense("prune:ratio=0.5", "leaks"),
        defense("clip", "leaks"),
    )
    steps = {step.code: step for step in advised(*rows, seed=3, attacks=["linear"], victims=4).next_steps}
    assert list(steps) == ["tune", "larger-batches", "secure-aggregation"]
    tune = spec_of(steps["tune"])
    assert tune.defenses == ("gaussian:std=0.001", "prune:ratio=0.5", "dpsgd:noise=0.01") and tune.utility is not None
    assert tune.seed == 3 and tune.attacks == ("linear", "standard"), "the same case, with the counters"
    assert tune.victims == 16, "enough for a recommendation"
    assert "gaussian:std=0.001 leaks. prune:ratio=0.5 leaks. clip alone only rescales" in steps["tune"].reason
    assert "Differential privacy (dpsgd) bounds by a proof" in steps["tune"].reason
    assert spec_of(steps["larger-batches"]).batch_size == 8
    assert spec_of(steps["secure-aggregation"]).aggregate == 8
    sums = {step.code: step for step in advised(*rows, attacks=["linear"], victims=4, aggregate=64).next_steps}
    assert sums["secure-aggregation"].command is None, "as large as is proposed"


def test_a_search_is_advised_until_a_leak_and_too_high_a_price_are_neighbours() -> None:
    def first(low: float, high: float) -> NextStep:
        rows = (control(), defense(f"gaussian:std={low}", "leaks"), held(f"gaussian:std={high}", 50.0), held("dpsgd", 80.0))
        return advised(*rows, utility=True).next_steps[0]

    assert spec_of(first(0.001, 10.0)).defenses == ("gaussian:std=0.001", "dpsgd")
    assert "gaussian:std=0.001 leaks and gaussian:std=10.0 costs too much" in first(0.001, 10.0).reason
    assert spec_of(first(0.01, 0.019)).defenses == ("dpsgd",)
    near = (control(), defense("dpsgd:noise=0.1", "leaks"), held("dpsgd:noise=0.19", 50.0))
    (step, *_) = advised(*near, utility=True).next_steps
    assert step.code == "no-setting-left" and step.reason.startswith("No setting was found: none is left to try between")


def test_a_defense_whose_strongest_settings_send_the_same_is_not_searched_again() -> None:
    change = {"cosine": 0.1, "noise_ratio": 1.0, "norm": 1.0}
    rows = [defense(f"prune:ratio={ratio}", "leaks", gradient=change) for ratio in (0.9999, 0.99999)]
    rows = [control(), *rows, defense("dpsgd:noise=0.1", "no leak shown", 20.0)]
    first, second, *_ = advised(*rows, utility=True).next_steps
    assert spec_of(first).defenses == ("dpsgd:noise=0.1",)
    assert second.reason == "No setting was found: prune:ratio=0.99999 leaks, and a stronger one sends the same."
    rows[1] = defense("prune:ratio=0.9999", "leaks", gradient=change | {"cosine": 0.2})
    first, *_ = advised(*rows, utility=True).next_steps
    assert spec_of(first).defenses == ("prune:ratio=0.99999", "dpsgd:noise=0.1")


def test_a_setting_that_leaks_and_costs_too_much_is_not_made_stronger() -> None:
    rows = (control(), defense("gaussian:std=0.01", "leaks", 0.0), defense("gaussian:std=0.1", "leaks", 12.5))
    first, second, *others = advised(*rows, utility=True).next_steps
    assert spec_of(first).defenses == ("dpsgd:noise=0.01",), "only what was not tried"
    assert second.code == "no-setting-left" and "gaussian:std=0.1 leaks and costs too much already" in second.reason
    assert [step.code for step in others] == ["larger-batches", "secure-aggregation"]
    (step, *_) = advised(*rows, utility=True, max_loss=20).next_steps
    assert spec_of(step).defenses == ("gaussian:std=0.1", "dpsgd:noise=0.01")


def test_a_setting_that_costs_too_much_is_made_milder() -> None:
    first, *_ = advised(control(), held("dpsgd:noise=4.0", 40.0), utility=True).next_steps
    assert first.code == "tune" and spec_of(first).defenses == ("dpsgd:noise=4.0",)


def test_of_python_objects_the_steps_are_in_words() -> None:
    rows = (control(), defense("gaussian:std=0.001", "leaks"))
    spec = AuditSpec(model=lambda: None, defenses=["gaussian:std=0.001"])
    steps = advise(Evidence(spec, rows, {r.spec: method(r.spec) for r in rows}, NEEDED, 10, 2500)).next_steps
    assert len(steps) == 3 and all(step.command is None for step in steps)
    assert steps[0].reason.startswith("gaussian:std=0.001 leaks.")


def test_attacks_that_had_no_time_come_before_stronger_ones() -> None:
    short: dict[str, Any] = {"attacks": ["standard", "ig:steps=26"], "without": ["swift", "prune-mask"]}
    (step,) = advised(control(control_rate=0.1), defense("prune", "cannot tell"), **short).next_steps
    assert step.code == "stronger-attacks" and "swift and prune-mask took no part" in step.reason
    assert step.command is not None and "without" not in step.command and "ig:steps" not in step.command
    (step,) = advised(control(control_rate=0.1), **(short | {"attacks": ["standard-v1"]})).next_steps
    assert step.command is not None and "--attack standard-v1" in step.command


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"attacks": ["linear"]}, {"attacks": ("linear", "standard")}),
        ({}, {"budget": "standard"}),
        ({"budget": "standard"}, {"budget": "thorough"}),
        ({"budget": "thorough", "batch_size": 8}, {"batch_size": 4}),
    ],
)
def test_a_weak_control_asks_for_stronger_attacks(settings: dict[str, Any], changed: dict[str, Any]) -> None:
    (step,) = advised(control(control_rate=0.1), defense("prune", "cannot tell"), **settings).next_steps
    assert step.code == "stronger-attacks"
    assert {name: getattr(spec_of(step), name) for name in changed} == changed


def test_without_a_stronger_attack_the_words_say_so() -> None:
    (step,) = advised(control(control_rate=0.1), defense("prune", "cannot tell"), budget="thorough").next_steps
    assert step.command is None and "No stronger setting of the suite is left to try" in step.reason
    few = defense("none", "cannot tell", doubts=["few-strangers"])
    assert advised(few, defense("prune", "cannot tell", doubts=["few-strangers"])).next_steps[0].code == "more-private-images"


def test_only_the_control_asks_for_defenses() -> None:
    (step,) = advised(control(), defenses=["none"]).next_steps
    assert step.code == "audit-defenses" and set(advice.FIRST) < set(spec_of(step).defenses)


# -- the measured loss ---------------------------------------------------------------------------------------------------


def with_interval(spec: str, loss: float, high: float) -> DefenseRow:
    row = held(spec, loss)
    assert row.utility is not None
    return row.model_copy(update={"utility": row.utility.model_copy(update={"std": 1.0, "low": 0.0, "high": high})})


def test_a_loss_that_may_be_too_large_is_not_recommended_but_measured_with_more_seeds() -> None:
    outcome = advised(control(), with_interval("prune:ratio=0.9", 4.0, 12.0), utility={"lr": 0.2})
    assert outcome.defense is None and reasons(outcome) == {"prune:ratio=0.9": ("uncertain-cost",)}
    (step,) = outcome.next_steps
    assert step.code == "complete-evidence" and step.reason.endswith("6 seeds of the training.")
    assert step.command is not None and "--utility-seeds 6" in step.command and "--utility-lr 0.2" in step.command
    assert advised(control(), with_interval("prune:ratio=0.9", 4.0, 9.9)).defense == "prune:ratio=0.9"
    costly = advised(control(), with_interval("prune:ratio=0.9", 11.0, 30.0))
    assert reasons(costly) == {"prune:ratio=0.9": ("too-costly",)}


def test_nothing_is_recommended_because_it_learns_more_than_an_undefended_model_that_learns_nothing() -> None:
    rows = [control(), held("dpsgd", -400.0)]
    rows[0] = rows[0].model_copy(update={"utility": rows[0].utility and rows[0].utility.model_copy(update={"acc_test": 0.13})})
    outcome = advised(*rows, utility=True)
    assert outcome.defense is None and reasons(outcome) == {"dpsgd": ("nothing-to-lose",)}
    assert [step.code for step in outcome.next_steps] == ["complete-evidence"] and outcome.candidates == ["dpsgd"]


def test_where_the_undefended_model_learns_nothing_a_longer_training_is_next() -> None:
    rows = [control(), held("prune:ratio=0.9", 0.0)]
    rows = [r.model_copy(update={"utility": r.utility and r.utility.model_copy(update={"acc_test": 0.11})}) for r in rows]
    outcome = advised(*rows, utility={"seeds": 2})
    assert reasons(outcome) == {"prune:ratio=0.9": ("nothing-to-lose",)}
    (step,) = outcome.next_steps
    assert step.code == "complete-evidence" and step.reason.endswith("80 rounds of the training.")
    assert step.command is not None and step.command.endswith("--utility --utility-seeds 2 --utility-rounds 80")
