"""The first screen and the first printed page: each question of a privacy officer, answered and bounded in length."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parsed_page import Page, edit, page_of

from gradveil.core.results import Rate
from gradveil.protection.promise import certify
from gradveil.report import answers, words
from gradveil.report.about import About
from gradveil.report.clauses import CLAUSES, DOCUMENTS
from gradveil.report.glossary import TERMS, marked
from gradveil.summary import Summary

Run = Callable[..., Path]
FIRST = ("pictures", "recognised", "promised", "next", "cost")
# What an officer asks, and the answers that tell it.
OFFICER = {
    "what was tested": ("tested", "adversary"),
    "what leaked": ("pictures", "recognised", "worst"),
    "how sure": ("sure",),
    "what is promised": ("promised",),
    "what to do": ("next", "cost"),
    "what was not tested": ("untested", "residual"),
    "when again": ("again",),
}


def answer_texts(page: Page) -> dict[str, str]:
    """The answers by their place, in the order of the page."""
    parts = re.findall(r'<div id="([a-z]+)"><dt>(.*?)</dt><dd>(.*?)</dd></div>', page.source, re.DOTALL)
    return {key: Page(f"{question} {answer}").text for key, question, answer in parts}


@pytest.mark.parametrize(
    "verdict", [{}, {"precode": "leaks"}, {"none": "cannot tell", "prune:ratio=0.9": "cannot tell", "precode": "cannot tell"}]
)
def test_each_question_of_an_officer_is_answered(run: Run, verdict: dict[str, str]) -> None:
    told = answer_texts(page_of(run(verdict=verdict)))
    assert tuple(told)[:5] == FIRST
    for question, keys in OFFICER.items():
        for key in keys:
            assert len(told[key].partition("?")[2]) > 12, f"{question}: {told[key]}"
    assert "EDPB Opinion 28/2024" in told["rules"] and "NIST SP 800-226" in told["rules"]
    assert "ISO/IEC 27559:2022 (6.2, 7.3.2, 8.2.2, 8.2.3, 8.3.4)" in told["rules"]
    assert "our reading of public texts, no legal advice and no statement of conformity" in told["rules"]
    assert re.search(r"\b[0-9a-f]{64}\b", told["evidence"]) and "gradveil report RUN --verify" in told["evidence"]


def test_the_answers_tell_what_the_numbers_say(run: Run) -> None:
    told = answer_texts(page_of(run(victims=16)))
    assert "Without a defense updates leak: 16 of 16 images picked out" in told["pictures"]
    assert "Private images leak under prune:ratio=0.9 (" in told["pictures"]
    assert "No leak was shown under precode." in told["pictures"]
    assert "this audit had no line-up" in told["recognised"] and "no line-up" in told["recognised"]
    assert "Use precode" in told["next"] and "gradveil export RUN" in told["next"]
    assert "precode: It costs 8.6% of the accuracy" in told["cost"]
    assert "the attacks work here. Without a defense 16 of 16 images" in told["sure"]
    assert "Without a defense: on average 100% picked out" in told["worst"] and "worst placed (victim" in told["worst"]
    assert "suite standard-v2 (gradveil 0.2.0)" in told["again"]


def test_the_worst_placed_of_what_leaks_is_told_before_what_does_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_PLACED", 2)
    summary = Summary.read(run(verdict={"prune:ratio=0.9": "no leak shown", "precode": "leaks"}))
    assert summary.recommended is None
    first, second, last = answers.worst_placed(summary)
    assert (
        first.startswith("Without a defense: ")
        and second.startswith("precode: ")
        and last.endswith("1 more defense in the table.")
    )


def test_a_promise_has_its_unit_adjacency_and_releases(run: Run) -> None:
    limit = certify("dpsgd:noise=4", rounds=1)

    def risk(rate: float, low: float) -> dict[str, Any]:
        identified = Rate(rate=rate, low=low, high=1.0, chance=0.005).model_dump()
        return {"m": 200, "identified": identified, "ranks": [1 if rate else 9] * 4, "certificate": limit.model_dump()}

    def change(summary: dict[str, Any], rate: float, low: float) -> None:
        summary["defenses"][2]["line_up"] = risk(rate, low)

    told = answer_texts(page_of(edit(run(), lambda s: change(s, 0.0, 0.0))))
    assert f"precode: {limit.sentences()[0]} Unit: one image, add/remove, 1 release; epsilon" in told["promised"]
    assert "Nothing is proved by prune:ratio=0.9." in told["promised"]
    assert "No line-up: without a defense and prune:ratio=0.9." in told["recognised"]
    wrong = answer_texts(page_of(edit(run(), lambda s: change(s, 1.0, 0.9))))
    assert "an error, so nothing is promised" in wrong["promised"] and "Nobody" not in wrong["promised"]
    assert "Whoever has an image can tell that it took part: precode (4 of 4 came first of 200" in wrong["recognised"]


def test_a_cost_for_which_there_was_no_time_is_told_in_hours(run: Run) -> None:
    summary = Summary.read(run(verdict={"precode": "leaks"}))
    unmeasured = [d.model_copy(update={"utility": None}) for d in summary.defenses]
    left_out = summary.model_copy(update={"defenses": unmeasured, "cost_left_out": 3240.0})
    assert answers.cost(left_out) == ("Not measured: that takes 54 minutes of one core, and there was no time.",)


def test_the_names_stand_on_the_page_and_are_escaped(run: Run) -> None:
    folder = run()
    assert page_of(folder).text.count("not stated") == 4 and "Audited on 18 November 2026" in page_of(folder).text
    About(organisation="<b>City</b>", auditor="A. Lee", system="Screening", system_version="2.1").store(folder)
    page = page_of(folder)
    assert "Do the model updates of Screening give away private images?" in page.text and not page.of("b")
    assert "Organisation <b>City</b> System Screening Version 2.1 Auditor A. Lee" in page.text


def test_each_clause_names_the_part_of_the_file_that_speaks_to_it(run: Run) -> None:
    page = page_of(run())
    section = page.source.partition('id="clauses"')[2].partition("</section>")[0]
    assert "our reading" in section and "no legal advice" in section and "does not say that a clause is met" in section
    rows = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", section, re.DOTALL)
    assert [name for name, _ in rows] == [clause.name for clause in CLAUSES]
    for name, answer in rows:
        places = re.findall(r'<a href="#([a-z]+)">[^<]+</a>', answer)
        assert places and all(re.search(rf'id="{place}"', page.source) for place in places), name
        assert len(Page(answer.partition("See:")[0]).text) > 40, name
    assert list(DOCUMENTS) == ["ISO/IEC 27559:2022", "EDPB Opinion 28/2024", "NIST SP 800-226"]
    assert [clause.clause for clause in DOCUMENTS["ISO/IEC 27559:2022"]] == ["6.2", "7.3.2", "8.2.2", "8.2.3", "8.3.4"]


def test_worst_cases_stand_on_the_first_screen_only_where_pictures_are_shown(run: Run) -> None:
    folder = run()
    for mode, pairs in (("shown", 3), ("blurred", 0), ("none", 0)):
        screen = page_of(folder, mode).source.partition('id="decision"')[2].partition("</section>")[0]
        assert screen.count('aria-label="The same image as rebuilt by') == pairs, mode


def test_attacks_that_were_chosen_are_named_in_place_of_a_suite(run: Run) -> None:
    page = page_of(edit(run(), lambda s: s.update(suite="custom")))
    told = answer_texts(page)
    assert "and 3 attacks (chosen for this audit) in this setting" in page.text
    assert "3 attacks (chosen for this audit: " in told["tested"] and "custom" not in told["tested"] + told["again"]
    assert "stronger attacks than those that were chosen (gradveil 0.2.0)" in told["again"]


def test_the_first_line_tells_of_a_line_up_that_succeeds_where_no_leak_is_shown(run: Run) -> None:
    identified = Rate(rate=1.0, low=0.9, high=1.0, chance=0.005).model_dump()

    def change(summary: dict[str, Any]) -> None:
        for row in summary["defenses"]:
            row["line_up"] = {"m": 200, "identified": identified, "ranks": [1] * 4, "certificate": None}

    assert "no leak. Whoever has an image can tell that it took part under precode. " in page_of(edit(run(), change)).text


def test_no_more_than_all_accuracy_is_said_to_be_lost(run: Run) -> None:
    measured = Summary.read(run()).defenses[2]
    assert measured.utility is not None
    wide = measured.model_copy(update={"utility": measured.utility.model_copy(update={"low": -30.0, "high": 190.8})})
    assert words.loss_interval(wide) == "−30.0% to 100.0%"


def test_a_large_audit_is_told_in_few_words(run: Run) -> None:
    leak = {"none": 1.0} | {f"prune:ratio=0.{i:02d},scope=global+{'x' * 60}": 0.3 * (i % 3) for i in range(40)}
    summary = Summary.read(run(leak=leak, victims=2))
    groups = answers.first_answers(summary), answers.file_answers(summary)
    assert all(len(text) < 900 for group in groups for answer in group for text in answer.texts)
    assert answers.type_size(About(), *groups) >= answers.SMALLEST_TYPE
    assert " more" in answers.pictures(summary)[1]


# -- words ------------------------------------------------------------------------------------------------------------


def test_jargon_is_explained_where_it_stands_and_at_the_end(run: Run) -> None:
    page = page_of(run())
    explained = {term.anchor: term.text for term in TERMS}
    links = [a for a in page.of("a") if a.get("class") == "term"]
    assert len(links) > 20 and all(explained[a["href"][1:]] == a["data-tip"] for a in links)
    assert {a["id"] for a in page.of("dt") if a.get("id", "").startswith("term-")} == set(explained)
    heads = {a.get("data-tip") for a in page.of("th") if "data-kind" in a}
    assert {explained[f"term-{name}"] for name in ("psnr", "ssim", "asr", "picked-out", "against")} <= heads
    for word in ("unrefuted", "cannot tell", "no leak shown", "line-up", "certificate", "release"):
        assert any(term.name == word for term in TERMS)


def test_a_word_is_marked_once_and_never_inside_a_name() -> None:
    text = str(marked("A line-up and a line-up; prune:control=update, my-victim, <victim>"))
    assert text.count('class="term"') == 2, "the first line-up, and the word between the brackets"
    assert "prune:control=update, my-victim, &lt;<a" in text
    assert marked("<script>&amp;") == "&lt;script&gt;&amp;amp;"


def test_warnings_link_to_their_explanation_from_the_first_screen(run: Run) -> None:
    def change(summary: dict[str, Any]) -> None:
        summary["warnings"] = [{"code": "weak-attacks", "text": "dlg does not show the leak"}]

    page = page_of(edit(run(), change))
    assert "Warning: dlg does not show the leak" in page.text and page.of("a", href="#caveats")
    assert page.of("a", href=f"{words.GUIDE}#weak-attacks")
