"""No two sentences contradict each other, whatever an audit has measured: on the page, in the terminal, in every text.

Numbers are drawn; verdicts, doubts, notices and the recommendation are derived from them by the code that judges audits.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_page import Page
from rich.console import Console
from test_advice import spec_of

from gradveil import attacks, defenses
from gradveil.attacks.suite import Counters
from gradveil.auditing.advice import Evidence, advise
from gradveil.auditing.case import Case
from gradveil.auditing.notices import SAME, audit_notices, defense_notices
from gradveil.auditing.plan import Cell
from gradveil.auditing.spec import SUITE, AuditSpec
from gradveil.auditing.verdict import Control, _rows, _verdict
from gradveil.certification.line_up import LineUpRisk
from gradveil.core.results import GradientChange, Rate
from gradveil.defenses.base import Defense
from gradveil.metrics import identification_rate
from gradveil.metrics.leak_test import Background
from gradveil.protection.promise import certify
from gradveil.report import answers, print_summary, words, write_report
from gradveil.report.audit_report import Report
from gradveil.report.pipeline import github_annotations
from gradveil.storage.run_folder import StoredCell
from gradveil.summary import CaseFacts, DefenseRow, DirectLook, LeakTest, Summary, UtilityRow, VictimsNeeded, Worst

LEVEL, CLASSES = 0.05, 4
AUDITED = ("prune:ratio=0.9", "prune:ratio=0.99", "gaussian:std=0.1", "gaussian:std=1.0", "clip", "mixup", "clip+gaussian")
TRIED = ("linear", "ig", "prune-mask", "noise-likelihood", "clip-aware")
LIMITS = (certify("dpsgd:noise=4", rounds=1), certify("dpsgd:noise=0.01", rounds=1))
LOOKS = tuple(DirectLook(p=p, seen=seen, tensor="fc.weight", reading="values") for p, seen in ((0.04, 1), (0.04, 0), (0.5, 1)))


class Mine(Defense):
    name = "mine"


@st.composite
def leak_tests(draw: st.DrawFn, base: LeakTest) -> LeakTest:
    """The test of one defense, on the strangers and the control of the audit."""
    numbers = {
        "p": max(base.smallest_p, draw(st.sampled_from([0.4, 0.06, 1.0, 0.05, 0.001]))),
        "power": draw(st.sampled_from([1.0, 0.8, 1.0, 0.79, 0.1])),
        "detectable": draw(st.sampled_from([0.1, 0.25, 0.1, 0.26, None])),
    }
    return base.model_copy(update=numbers)


@st.composite
def audits(draw: st.DrawFn) -> Summary:
    victims, batch = draw(st.sampled_from([(16, 1), (17, 1), (32, 1), (8, 2), (40, 1), (4, 4), (2, 1)]))
    named = draw(st.lists(st.sampled_from(TRIED), unique=True))
    spec = AuditSpec(
        victims=victims,
        batch_size=batch,
        defenses=draw(st.lists(st.sampled_from(AUDITED), unique=True)) or ["none"],
        attacks=[*named, *([SUITE] if draw(st.booleans()) or not named else [])],
        without=draw(st.sampled_from([(), (), ("noise-likelihood",)])),
        budget=draw(st.sampled_from(["quick", "thorough"])),
        utility=draw(st.sampled_from([True, True, False])),
        max_loss=draw(st.sampled_from([10.0, 10.0, 0.0, 50.0])),
    )
    methods: dict[str, Defense] = {str(text): defenses.parse(text) for text in spec.defenses}
    if draw(st.booleans()):
        methods["mine"] = Mine()
    strong = draw(st.booleans())  # half of the audits have attacks that work, or else hardly any could tell anything
    smallest = 0.001 if strong else draw(st.sampled_from([0.001, 0.2]))
    images = victims * batch
    hits = images if strong else draw(st.integers(0, images))
    base = LeakTest(
        statistic=9.0, null_mean=2.0, p=1.0, level=LEVEL, draws=999, strangers=40, untested=draw(st.sampled_from([0, 0, 1])),
        smallest_p=smallest, control_rate=hits / images, control_null=0.01, power=0.0, detectable=None,
    )  # fmt: skip
    slots = SimpleNamespace(smallest_p=smallest, stranger_label=np.zeros(40))
    stub = SimpleNamespace(
        spec=spec, slots=slots, data=SimpleNamespace(has_classes=draw(st.booleans())), attack=attacks.parse, defenses=methods
    )
    case = cast("Case", stub)
    weak = st.one_of(st.none(), leak_tests(base))
    undefended = base.model_copy(update={"p": 0.001, "power": 1.0, "detectable": 0.1}) if strong else draw(weak)
    on_control = {name: draw(st.sampled_from(["ok", "ok", "failed"])) if undefended else "failed" for name in TRIED}
    control = Control(
        rate=base.control_rate, null=base.control_null, leaked=(1.0,), leaks=undefended is not None and undefended.leaks,
        background=cast("Background", None), ran=frozenset(name for name in TRIED if on_control[name] == "ok"), weak=(),
    )  # fmt: skip
    clean = draw(st.sampled_from([0.9, 0.9, 0.26, None])) if spec.utility else None
    rows = [
        draw(_rows_of(case, text, method, base, control, undefended, on_control, hits, clean))
        for text, method in methods.items()
    ]
    needed = (VictimsNeeded(share=0.25, victims=draw(st.sampled_from([None, 7, 30]))),) if control.ran else ()
    evidence = Evidence(spec, rows, methods, needed, 1 / CLASSES, draw(st.sampled_from([50, 2500])))
    facts = {
        **{name: getattr(spec, name) for name in CaseFacts.model_fields if hasattr(spec, name)},
        **{"input_shape": (1, 8, 8), "num_classes": CLASSES, "class_names": ()},
    }
    return Summary(
        gradveil="0.2.0", suite="standard-v1", command=spec.command(), scope="the scope", case=CaseFacts(**facts),
        granted=("the model",), not_tested=("a trained model",), warnings=audit_notices(case, rows, ()), victims_needed=needed,
        defenses=tuple(rows), baseline=None, recommendation=advise(evidence),
    )  # fmt: skip


@st.composite
def _rows_of(
    draw: st.DrawFn, case: Case, text: str, method: Defense, base: LeakTest, control: Control, undefended: LeakTest | None,
    on_control: dict[str, str], hits: int, clean: float | None,
) -> DefenseRow:  # fmt: skip
    """One defense; `none` is the control."""
    counters, is_control = Counters.of(method), text == "none"
    names = [*TRIED, *draw(st.sampled_from([counters.accepted, counters.accepted, ()]))]
    kind = draw(st.sampled_from(["all ok", "all ok", "mixed", "no attack"]))
    states = st.sampled_from(
        {"all ok": ["ok"], "mixed": ["ok", "failed", "not run", "not applicable"], "no attack": ["not applicable"]}[kind]
    )
    status = {**on_control} if is_control else {name: draw(states) for name in dict.fromkeys(names)}
    cells = [
        StoredCell(
            key=f"{text}-{name}", kind="attack", defense=text, attack=name, tensors_sha256=None, status=cast("Any", state)
        )
        for name, state in status.items()
    ]
    ran = "ok" in status.values()
    test = undefended if is_control else draw(leak_tests(base)) if ran else None
    agreement = 1.0 if is_control else draw(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9, SAME]))
    observed = StoredCell(
        key=text, kind="observe", defense=text, attack="", tensors_sha256=None, status="ok", agreement=agreement
    )
    verdict, doubts = _verdict(case, method, test, control, observed, cells)
    identified = hits if is_control else draw(st.integers(0, case.spec.victims)) if verdict == "leaks" else 0
    images = case.spec.victims * case.spec.batch_size
    rate = Rate(rate=identified / images, low=0.0, high=max(0.2, identified / images), chance=0.001)
    accuracy = (
        None
        if clean is None
        else clean
        if is_control
        else draw(st.sampled_from([clean, 0.99 * clean, 0.95 * clean, 0.85 * clean, 0.25, None]))
    )
    loss = None if accuracy is None or clean is None else 100 * (1 - accuracy / clean)
    half = draw(st.sampled_from([None, 0.5, 8.0]))  # of the interval
    bounds = {} if loss is None or half is None else {"std": half, "low": loss - half, "high": loss + half}
    first = draw(st.lists(st.sampled_from([1, 1, 2, 200]), min_size=case.spec.victims, max_size=case.spec.victims))
    hit = torch.tensor([rank == 1 for rank in first])
    limit = draw(st.sampled_from([None, *LIMITS]))
    risk = LineUpRisk(m=200, identified=identification_rate(hit, 1 / 200, len(hit)), ranks=tuple(first), certificate=limit)
    row = DefenseRow(
        spec=text, line_up=draw(st.sampled_from([None, risk, risk])),
        stage=tuple(method.stages), counter=counters.accepted, claimed=counters.claimed, scope="the scope",
        verdict=verdict, doubts=doubts, test=test, warnings=(), gradient=GradientChange(cosine=0.5, noise_ratio=1.0),
        utility=None if accuracy is None else UtilityRow(
            acc_test=accuracy, acc_train=None, acc_sensitive=None, seconds_per_round=1.0, pdm=loss, overhead=1.0,
            model="lenet", audited_model=True, audited_updates=True, scope="FedSGD",
            seeds=3, rounds=20, lr=0.05, server_lr=1.0, **bounds,
        ),
        attacks=tuple(r for cell in cells for r in _rows(case, counters, Cell(cell.key, "attack", text, cell.attack), cell)),
        worst=Worst(identified=rate, scored=images, attacks=1, by_victim=()) if ran and test else None,
        look=draw(st.sampled_from([None, *LOOKS])) if test else None,
    )  # fmt: skip
    return row.model_copy(update={"warnings": defense_notices(case, method, (), observed, cells, row)})


def everything_said(summary: Summary) -> dict[str, str]:
    """Every text that a reader may meet."""
    console = Console(file=io.StringIO(), width=100_000)
    print_summary(summary, console)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "summary.json").write_text(summary.model_dump_json())
        page = Page(write_report(Path(folder), "none").read_text(encoding="utf-8"))
    return {
        "terminal": console.file.getvalue(),  # type: ignore[attr-defined]
        "page": page.text,
        "notebook": " ".join(Page(Report(summary)._repr_html_()).text.split()),
        "assessment": words.assessment(summary),
        "annotations": "\n".join(github_annotations(summary, [])),
    }


def counted(overall: str, specs: Sequence[str]) -> dict[str, int]:
    """The verdicts as the overall sentence counts them."""
    phrases = {
        "leaks": r"leaks?",
        "no leak shown": "showed no leak",
        "unrefuted": "(?:is|are) unrefuted",
        "cannot tell": "cannot be judged by this audit",
    }
    if len(specs) == 1:
        return {v: 1 for v, phrase in phrases.items() if re.fullmatch(rf"The audited defense \S+ {phrase}\.", overall)}
    if match := re.fullmatch(r"None of the (\d+) audited defenses can be judged by this audit\.", overall):
        return {"cannot tell": int(match[1])}
    numbers = {v: re.search(rf"(\d+|Both) (?:audited defenses )?{phrase}\b", overall) for v, phrase in phrases.items()}
    return {v: 2 if match[1] == "Both" else int(match[1]) for v, match in numbers.items() if match}


@settings(max_examples=200, deadline=None)
@given(audits())
def test_no_sentence_contradicts_the_numbers_or_another_sentence(summary: Summary) -> None:
    said, advice = everything_said(summary), summary.recommendation
    judged = [d for d in summary.defenses if not d.control]
    control = summary.control
    assert control is not None
    verdicts = {d.spec: d.verdict for d in judged}
    leaking = [d for d in judged if d.verdict == "leaks"]
    every = "\n".join(said.values())

    # the verdicts, counted and said once
    if judged:
        overall = words.overall(summary)
        assert counted(overall, list(verdicts)) == {v: [*verdicts.values()].count(v) for v in verdicts.values()}
        assert all(overall in said[where] for where in ("terminal", "page", "notebook"))
    assert ("no leak shown" in said["terminal"]) == ("no leak shown" in verdicts.values())
    assert ("No leak was shown by the attacks tried" in said["page"]) == ("no leak shown" in verdicts.values())
    assert "Unrefuted" not in words.verdict_sentence(control) and "built to break" not in words.verdict_sentence(control)
    for defense in summary.defenses:
        sentence = words.verdict_sentence(defense)
        assert ("leak:" in sentence) == (defense.verdict == "leaks") and not re.search(r"leak: none of", sentence)
        assert ("cannot tell" in sentence) == (defense.verdict == "cannot tell")

    # the line-up is told beside the verdict, as its numbers are
    for defense in summary.defenses:
        sentence, risk = words.line_up_sentence(defense), defense.line_up
        assert (sentence == "") == (risk is None)
        assert defense.model_copy(update={"line_up": None}).verdict == defense.verdict
        assert words.verdict_sentence(defense) == words.verdict_sentence(defense.model_copy(update={"line_up": None}))
        if risk is None:
            continue
        assert words.risk_bar(risk) in said["page"]
        assert ("no limit is proved" in words.risk_bar(risk)) == (risk.certificate is None)
        assert sentence in said["page"] and f"Line-up under {defense.spec}: {sentence}" in said["terminal"]
        assert sentence.startswith("Whoever has an image can tell") == (risk.identified.low > risk.identified.chance)
        assert sentence.startswith("It was not shown") == (risk.identified.low <= risk.identified.chance)
        hits = sum(rank == 1 for rank in risk.ranks)
        assert f"{hits or 'none'} of {len(risk.ranks)} image" in sentence and "leak" not in sentence
        proves = risk.certificate is not None
        assert ("proves no limit" in sentence) == (not proves and not defense.control)
        crossed = risk.certificate is not None and risk.identified.low > risk.certificate.upper
        assert ("one of the two is in error" in sentence) == crossed
        assert ("at most, for 1 release" in sentence) == (proves and not crossed)
    assert ("Line-up under" in said["terminal"]) == any(d.line_up for d in summary.defenses)

    # what is said about the control, and about the audit as a whole
    assert ("show no leak without a defense" in every) <= (control.verdict != "leaks")
    assert ("The attacks show no leak without a defense." in every) <= (not leaking)
    assert "says nothing about" not in every and "did not work" not in every
    assert ("attacks get too little" in every) <= (control.verdict != "leaks" or control_excess(control) < 0.5)

    # the first page: every defense stands once among the pictures and once among the line-ups, with its verdict
    groups = answers.first_answers(summary), answers.file_answers(summary)
    told = {answer.key: " ".join(answer.texts) for group in groups for answer in group}
    assert all(text in said["page"] for group in groups for answer in group for text in answer.texts)
    beginnings = {
        "leaks": "Private images leak under ",
        "no leak shown": "No leak was shown under ",
        "unrefuted": "Unrefuted: ",
        "cannot tell": "This audit cannot tell whether images leak under ",
    }
    lines = next(answer.texts for answer in groups[0] if answer.key == "pictures")
    for verdict, beginning in beginnings.items():
        specs, (*line,) = [d.spec for d in judged if d.verdict == verdict], (t for t in lines if t.startswith(beginning))
        assert len(line) == bool(specs)
        for text in line:
            named = [spec for spec in verdicts if re.search(rf"{re.escape(spec)}(?= |,|\.$|\. )", text)]
            assert named == specs[: answers.MOST_NAMED]
            assert (f" and {len(specs) - answers.MOST_NAMED} more" in text) == (len(specs) > answers.MOST_NAMED)
    assert ("Without a defense updates leak" in told["pictures"]) == (control.verdict == "leaks")
    assert ("cannot tell whether images leak without a defense" in told["pictures"]) == (control.verdict == "cannot tell")
    assert ("the attacks work here" in told["sure"]) == (control.verdict == "leaks" and control.test is not None)
    assert ("with a probability of" in told["sure"]) == ("the attacks work here" in told["sure"])
    risks = [d.line_up for d in summary.defenses if d.line_up]
    assert ("Whoever has" in told["recognised"]) == any(risk.identified.low > risk.identified.chance for risk in risks)
    assert ("this audit had no line-up" in told["recognised"]) == (not risks)
    assert ("No line-up:" in told["recognised"]) == (0 < len(risks) < len(summary.defenses))
    proved = [risk for risk in risks if risk.certificate is not None][: answers.MOST_NAMED]
    assert told["promised"].startswith("Nothing") == (not proved)
    assert told["promised"].count("so nothing is promised") == sum(risk.contradicts for risk in proved)
    assert told["promised"].count("Unit: one image, add/remove, 1 release") == sum(not risk.contradicts for risk in proved)
    best = summary.recommended
    assert told["next"].startswith("Use ") == (best is not None)
    assert ("no audited defense can be recommended" in told["residual"]) == (best is None and not advice.candidates)
    assert ("no defense is recommended yet" in told["residual"]) == (best is None and bool(advice.candidates))
    assert ("Not measured" in told["cost"]) == (best is None and all(d.loss is None for d in judged))
    command = {answer.key: answer.command for answer in groups[0]}["next"]
    assert command == ("gradveil export RUN" if best else advice.next_steps[0].command)
    assert "safe" not in " ".join(told.values()).lower()

    # doubts are true of the numbers
    for defense in summary.defenses:
        for doubt in defense.doubts:
            assert true_doubt(doubt, defense, control), (doubt, defense)
        codes = {notice.code for notice in defense.warnings}
        assert ("few-victims" in codes) == ("few-victims" in defense.doubts)
        assert ("no-attack-ran" in codes) == (defense.test is None)
        seen = defense.look is not None and defense.look.p <= 0.05 and defense.look.seen > 0
        assert ("seen-directly" in codes) == (
            seen and defense.verdict == "leaks"
        )  # of another verdict it would say the contrary

    # the recommendation
    assert (best is None) == (advice.defense is None)
    assert ("Recommended: " in said["terminal"]) == ("Recommended defense" in said["page"]) == (best is not None)
    assert ("With the defense " in said["assessment"]) == (best is not None)
    assert any(phrase in every for phrase in ("No defense is recommended yet", "can be recommended")) == (best is None)
    if best is not None:
        assert best.verdict == "no leak shown" and any(row.adaptive and row.ok for row in best.attacks)
        assert control.verdict == "leaks" and control_excess(control) >= 0.5
        assert best.test is not None and best.test.detectable is not None and best.test.detectable <= 0.25
        assert best.worst is not None and best.worst.scored - best.test.untested >= 16 and summary.case.victims >= 8
        assert best.loss is not None and best.loss <= advice.max_loss
        assert best.most_lost is not None and best.most_lost <= advice.max_loss
        assert best.accuracy is not None and best.accuracy >= 1 / CLASSES + 0.1 * (1 - 1 / CLASSES)
        cheaper = [d.spec for d in judged if d.loss is not None and d.loss < best.loss]
        assert all("costs-more" not in r.reasons for r in advice.rejected if r.spec in cheaper)
    assert all(verdicts[spec] in ("no leak shown", "unrefuted") for spec in advice.candidates)
    for rejected in advice.rejected:
        text, row = words.rejection(summary, rejected), next(d for d in judged if d.spec == rejected.spec)
        assert ("– it leaks." in text) == (row.verdict == "leaks") and rejected.reasons
        assert ("cannot tell" in text) == (row.verdict == "cannot tell")
        assert ("was not measured" in text) <= (row.loss is None)
        assert ("built to break it" in text) <= (row.verdict == "unrefuted")
        assert all(text in said[where] for where in ("page", "notebook")) and text in said["terminal"]

    # the next steps
    codes = [step.code for step in advice.next_steps]
    assert codes or best is not None, "where nothing can be recommended there is something to do"
    assert len(codes) == len(set(codes))
    assert ("tune" in codes) <= (not advice.candidates)
    for step in advice.next_steps:
        assert step.reason in said["page"] and step.reason in said["terminal"]
        if step.command is not None:
            assert step.command in said["page"] and step.command in said["terminal"]
            assert spec_of(step).command() == step.command not in ("gradveil audit", "gradveil tune")
            assert (step.command == summary.command) == (step.code == "more-time"), "else something changes"


def control_excess(control: DefenseRow) -> float:
    return control.test.control_rate - control.test.control_null if control.test else 0.0


def true_doubt(doubt: str, defense: DefenseRow, control: DefenseRow) -> bool:
    test = defense.test
    if doubt == "no-attack-ran":
        return test is None and not any(row.ok for row in defense.attacks)
    if doubt == "attacks-failed":
        ran = {row.spec for row in control.attacks if row.ok}
        return any(row.status in ("failed", "not run") and row.spec in ran for row in defense.attacks)
    if doubt == "control-does-not-leak":
        return control.verdict == "cannot tell"
    assert test is not None
    return {
        "few-strangers": test.smallest_p > LEVEL,
        "control-leaks-little": control.verdict == "leaks" and control_excess(control) < 0.5,
        "few-victims": control.verdict == "leaks" and control_excess(control) >= 0.5 and test.power < 0.8,
    }[doubt]
