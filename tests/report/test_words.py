"""What is said about the numbers: the verdict's sentence, the recommendation, the paragraph for an assessment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from advised import advised
from pydantic import ValidationError

from gradveil.core.text import plain
from gradveil.report import words
from gradveil.summary import DefenseRow, LeakTest, Summary, VictimsNeeded


def row(spec: str = "ig", **fields: Any) -> dict[str, Any]:
    facts = {"status": "ok", "adaptive": False, "knowledge": "realistic", "updates": 1, "cell": "c"}
    return {"spec": spec, **facts, "seconds": 1.0, "iterations": 1, "error": None, **fields}


TRAINED = {
    "model": "lenet", "audited_model": True, "audited_updates": True,
    "scope": "FedSGD, 10 clients", "seeds": 3, "rounds": 20, "lr": 0.05,
    "server_lr": 1.0,
}  # fmt: skip
TEST = {
    "statistic": 9.0, "null_mean": 2.0, "p": 0.001, "level": 0.05, "draws": 999, "strangers": 40, "untested": 0,
    "smallest_p": 0.001, "control_rate": 1.0, "control_null": 0.02, "power": 1.0, "detectable": 0.2,
}  # fmt: skip


def defense(spec: str, verdict: str, pdm: float | None = None, **fields: Any) -> DefenseRow:
    rate = {"rate": 1.0, "low": 0.63, "high": 1.0} if verdict == "leaks" else {"rate": 0.0, "low": 0.0, "high": 0.37}
    cost = None if pdm is None else {"acc_test": 0.9 * (1 - pdm / 100), "pdm": pdm, "overhead": 1.5}
    unmeasured = {"acc_train": None, "acc_sensitive": None, "seconds_per_round": None, **TRAINED}
    given = {
        "spec": spec,
        "verdict": verdict,
        "stage": [],
        "counter": [],
        "scope": "the scope",
        "warnings": [],
        "gradient": None,
        "utility": cost and {**cost, **unmeasured},
        "attacks": [row(scored=8, identified={**rate, "chance": 0.001})],
        "worst": {"identified": {**rate, "chance": 0.001}, "scored": 8, "attacks": 1, "by_victim": []},
        "test": TEST | ({} if verdict == "leaks" else {"p": 0.4}),
        "doubts": ["few-victims"] if verdict == "cannot tell" else [],
    }
    return DefenseRow.model_validate({**given, **fields}, strict=False)


def view(*defenses: DefenseRow, **fields: Any) -> Summary:
    case = {"data": "faces", "model": "lenet", "victims": 8, "batch_size": 1, "knowledge": "realistic", "seed": 0}
    case |= {"local_steps": 1, "local_lr": 0.01, "trained_rounds": 0, "trained_epochs": 0, "updates": 1}
    case |= {"budget": "quick", "input_shape": [1, 8, 8], "num_classes": 2, "class_names": []}
    given = {
        "gradveil": "0.2.0",
        "suite": "standard-v2",
        "command": None,
        "scope": "lenet on faces",
        "case": case,
        "granted": ["the model"],
        "not_tested": ["a trained model"],
        "warnings": [],
        "victims_needed": [],
        "baseline": None,
    }
    return Summary.model_validate(advised({**given, "defenses": defenses, **fields}), strict=False)


CONTROL = defense("none", "leaks", 0.0)


@pytest.mark.parametrize("verdict", ["leaks", "no leak shown", "unrefuted", "cannot tell"])
def test_a_verdict_is_one_sentence_with_count_interval_and_chance(verdict: str) -> None:
    sentence = words.verdict_sentence(view(defense("a", verdict)).defenses[0])
    assert sentence.endswith(".") and ". " not in sentence
    assert "of 8 private images" in sentence and "confidence interval" in sentence and "chance 0.1%" in sentence


@pytest.mark.parametrize(
    ("doubts", "says"),
    [
        (["control-leaks-little"], "without a defense the attacks get too little (40% of the images)."),
        (["few-victims"], "with so few victims a leak could have stayed unseen."),
        (["few-strangers"], "too few strangers are left to compare with."),
        (["control-does-not-leak"], "the attacks show no leak without a defense either."),
        (["no-attack-ran"], "no attack ran."),
        (
            ["few-victims", "attacks-failed"],
            "stayed unseen and an attack that works without a defense, or the direct look, failed or did not run",
        ),
    ],
)
def test_the_sentence_says_why_it_cannot_tell(doubts: list[str], says: str) -> None:
    outcome = TEST | {"p": 0.4, "control_rate": 0.4}
    sentence = words.verdict_sentence(defense("a", "cannot tell", test=outcome, doubts=doubts))
    assert sentence.startswith("This audit cannot tell: none of 8") and says in sentence


def test_the_control_is_never_called_unrefuted_and_needs_no_counter() -> None:
    sentence = words.verdict_sentence(defense("none", "cannot tell", doubts=["control-does-not-leak"]))
    assert "not more than images of strangers would give" in sentence and "built to break" not in sentence
    for verdict in ("unrefuted", "no leak shown"):
        with pytest.raises(ValidationError, match="the control either leaks or nothing can be told"):
            defense("none", verdict)


@pytest.mark.parametrize(
    ("verdict", "doubts"), [("cannot tell", []), ("leaks", ["few-victims"]), ("unrefuted", ["few-victims"])]
)
def test_doubts_belong_to_cannot_tell(verdict: str, doubts: list[str]) -> None:
    with pytest.raises(ValidationError, match="doubts are named where the verdict is `cannot tell`"):
        defense("a", verdict, doubts=doubts)


def test_a_leak_without_an_identified_image_says_what_shows_it() -> None:
    none = {"identified": {"rate": 0.0, "low": 0.0, "high": 0.37, "chance": 0.001}, "scored": 8, "attacks": 1, "by_victim": []}
    half_good = words.verdict_sentence(defense("a", "leaks", worst=none))
    assert half_good.startswith(
        "Updates leak: what is sent or rebuilt is more like the private images than like strangers (p = 0.001)"
    )
    rescaled = words.verdict_sentence(defense("a", "leaks", worst=none, test=TEST | {"p": 0.4}))
    assert rescaled.startswith("Updates leak: they are the undefended ones up to their size, and those leak; here none of 8")


def test_the_test_stands_beside_the_verdict_in_one_line() -> None:
    outcome = LeakTest.model_validate(TEST | {"untested": 2, "p": 0.0123}, strict=False)
    assert words.evidence_line(outcome) == (
        "p = 0.012 against 40 strangers; 2 images untested; statistic 9.0, 2.0 expected without a leak; "
        "undefended 100% identified; smallest visible leak: 20% of the images"
    )


def test_the_victims_that_are_needed_are_told() -> None:
    needed = [VictimsNeeded(share=0.1, victims=15), VictimsNeeded(share=0.5, victims=None)]
    assert words.needed_sentence(needed).endswith("80%: 15 for 10% and more than the data has for 50%.")
    assert words.visible(0.2).startswith("A leak of 20% of the images") and "Not even" in words.visible(None)


def test_a_small_sample_does_not_hide_its_upper_bound() -> None:
    sentence = words.verdict_sentence(view(defense("a", "no leak shown")).defenses[0])
    assert "none of 8" in sentence and "up to 37%" in sentence


def test_a_rate_that_is_no_count_of_the_images_is_not_turned_into_one() -> None:
    worst = {"identified": {"rate": 0.3, "low": 0.1, "high": 0.6, "chance": 0.01}, "scored": 8}
    odd = defense("a", "leaks", worst={**worst, "attacks": 1, "by_victim": []})
    assert words.recovered(odd).startswith("30% of the private images could be picked out")


def test_failed_and_inapplicable_attacks_count_as_not_tested() -> None:
    rows = [row("ggl", status="not applicable", error="needs a generator"), row("dlg", status="failed", error="not finite")]
    given = view(CONTROL, defense("a", "no leak shown", attacks=rows), defense("b", "no leak shown", attacks=rows[:1]))
    items = words.not_tested(given)
    assert "ggl against 2 defenses: not applicable (needs a generator)" in items
    assert "dlg against a: failed (not finite)" in items


def test_counters_that_were_left_out_count_as_not_tested() -> None:
    rows = [row("clip-aware:steps=3")]
    both = view(CONTROL, defense("a", "unrefuted", counter=["clip-aware", "repeats"], attacks=rows))
    assert words.not_tested(both)[-1] == "repeats against a: not part of this audit (built to break it)"


def test_the_audits_own_words_come_first() -> None:
    given = view(
        CONTROL,
        granted=["labels"],
        not_tested=["phones"],
        warnings=[{"code": "granted-more", "text": "level paper"}],
        scope="our scope",
    )
    assert words.not_tested(given) == ["phones"]
    assert [c.text for c in words.caveats(given)] == ["level paper"]
    assert "granted: labels." in words.assessment(given) and "in this setting: our scope." in words.assessment(given)


def test_without_a_control_the_reader_is_told() -> None:
    assert any("no undefended control" in c.text for c in words.caveats(view(defense("a", "no leak shown", 1.0))))


def test_the_assessment_names_risk_scope_grant_finding_cost_and_rest() -> None:
    text = words.assessment(view(CONTROL, defense("loda", "no leak shown", 4.0)))
    parts = ("lenet on faces", "granted:", "Without a defense, 8 of 8", "No defense is recommended yet.")
    for part in (
        *parts,
        "loda – ",
        "8 tested images in 8 batches are too few (at least 16 in 8)",
        "Residual risk",
        "Not tested:",
    ):
        assert part in text
    assert "\n" not in text


def test_nothing_is_ever_called_safe(run: Callable[..., Path]) -> None:
    given = Summary.read(run())
    said = [words.overall(given), words.assessment(given), words.recommendation(given)]
    said += (
        [words.verdict_sentence(d) for d in given.defenses] + [c.text for c in words.caveats(given)] + words.not_tested(given)
    )
    assert "safe" not in " ".join(said).lower()


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (1.0, "100%"), (0.875, "88%"), (0.004, "0.4%"), (0.0005, "0.05%"), (0.9996, "99.9%"), (None, "–")],
)
def test_percent_never_rounds_to_none_or_all(share: float | None, text: str) -> None:
    assert words.percent(share) == text


def test_numbers_that_are_missing_negative_or_tiny() -> None:
    assert [words.digits(v) for v in (None, -1.5, 0.0, -0.0004)] == ["–", "−1.50", "0.00", "0.00"]
    assert words.digits(0.0004, 3) == "4.0e-04"


def test_overall_counts_every_verdict_but_the_control() -> None:
    many = view(CONTROL, defense("a", "leaks"), defense("b", "unrefuted"), defense("c", "no leak shown"))
    assert words.overall(many) == "Of 3 audited defenses, 1 leaks, 1 showed no leak and 1 is unrefuted."
    assert words.overall(view(CONTROL, defense("a", "leaks"), defense("b", "leaks"))) == "Both audited defenses leak."
    unclear = [defense(name, "cannot tell") for name in "abc"]
    assert words.overall(view(CONTROL, *unclear)) == "None of the 3 audited defenses can be judged by this audit."
    assert words.overall(view(CONTROL, defense("a", "leaks"))) == "The audited defense a leaks."


def test_control_characters_cannot_reach_a_terminal() -> None:
    assert plain("a\x1b[2Jb\n") == "a\ufffd[2Jb\ufffd"


def test_the_cost_has_its_interval_its_scope_and_the_name_of_another_model() -> None:
    assert words.training_scope(view(defense("none", "leaks"))) is None
    noise = defense("noise", "leaks", 5.0)
    assert noise.utility is not None
    assert words.loss_interval(noise) == "" and "interval" not in words.cost(view(CONTROL, noise), noise)
    grid = {"tried": (1.0, 0.25, 4.0)}
    measured = {"low": 2.0, "high": 8.04, "std": 1.0, "server_lr": 4.0, "acc_absent": 0.5, **grid}
    other = {**measured, "audited_model": False, "model": "cnn"}
    one, two = (noise.model_copy(update={"utility": noise.utility.model_copy(update=u)}) for u in (measured, other))
    assert words.cost(view(CONTROL, one), one).startswith(
        "It costs 5.0% of the accuracy (85.5% instead of 90.0% undefended; 95% interval of the loss: 2.0% to 8.0%)"
    )
    assert words.cost(view(CONTROL, two), two).endswith("That is the cost of another model, cnn.")
    assert "All have the same learning rate. All clients" in str(words.training_scope(view(CONTROL, noise)))
    assert CONTROL.utility is not None
    clean = CONTROL.model_copy(update={"utility": CONTROL.utility.model_copy(update=grid)})
    scope = words.training_scope(view(clean, one))
    assert scope is not None and "lenet, the audited model: FedSGD, 10 clients; per defense 3 trainings" in scope
    assert "none 0.05 × 1; noise 0.05 × 4 (the largest tried)." in scope and "All clients are defended" in scope
    assert "reaches 50.0% undefended" in str(words.training_scope(view(one)))
    assert "cnn, another model than the audited one" in str(words.training_scope(view(two)))
