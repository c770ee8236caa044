"""Result cards: strict, true to their run, consistent, and on a page that is complete without its script."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parsed_page import Page, edit
from pydantic import ValidationError
from test_browser import CHROMIUM, browse

from gradveil.cli.check import audit_of
from gradveil.core.errors import UserError
from gradveil.report.card_check import agreements
from gradveil.report.cards import Card, CardClaim, cards_of, cards_page, read_cards
from gradveil.summary import Summary

FOLDER = Path(__file__).parents[2] / "docs" / "results" / "cards"
FILES = sorted(FOLDER.glob("*.json"))
CLAIM = CardClaim(text="PSNR 5.0 dB", by="its authors", source="Table 1")


@pytest.fixture
def audited(run: Callable[..., Path]) -> Callable[..., Path]:
    """A synthetic run whose `audit.yaml` says what was run."""

    def make(**fields: Any) -> Path:
        folder = run(**fields)
        specs = [defense.spec for defense in Summary.read(folder).defenses]
        (folder / "audit.yaml").write_text(json.dumps({"defenses": specs, "victims": fields.get("victims", 4)}))
        return folder

    return make


def changed(card: Card, **fields: object) -> dict[str, Any]:
    return json.loads(card.model_dump_json()) | fields


# -- the cards of the project ------------------------------------------------------------------------------------------


def test_there_are_cards() -> None:
    assert len(FILES) >= 10
    assert "none" in {card.defense for card in read_cards(FOLDER)}, "the control shows how strong the attacks are"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_card_is_strict_consistent_and_can_be_run_again(file: Path) -> None:
    card = Card.read(file)
    assert json.loads(file.read_text()) == json.loads(card.model_dump_json()), "nothing but the fields of a card"
    spec = audit_of(card)  # the command parses, and says the same as the evidence
    assert spec.suite is not None and spec.suite.name == card.evidence.suite
    assert f"{card.evidence.victims} victims" in card.evidence.scope and "torch" in card.evidence.packages
    measured = card.measured
    assert measured.worst_attack in measured.attacks
    assert measured.identified and measured.identified.low <= measured.identified.rate <= measured.identified.high
    assert measured.line_up is None or len(measured.line_up.ranks) == card.evidence.victims
    if measured.verdict == "no leak shown":
        assert set(card.counters) & {attack.partition(":")[0] for attack in measured.attacks}


def test_the_page_is_made_from_the_cards() -> None:
    same = (FOLDER / "index.html").read_text(encoding="utf-8") == cards_page(read_cards(FOLDER))
    assert same, "run `python benchmarks/result_cards.py`"


# -- from a run --------------------------------------------------------------------------------------------------------


def test_cards_hold_what_the_summary_says(audited: Callable[..., Path], tmp_path: Path) -> None:
    folder = audited(victims=16)
    summary = Summary.read(folder)
    cards = cards_of(folder, {"prune": CLAIM})
    assert [card.defense for card in cards] == ["none", "prune:ratio=0.9", "precode"]
    for card, row in zip(cards, summary.defenses, strict=True):
        assert row.worst and row.best
        assert (card.measured.verdict, card.measured.worst_attack) == (row.verdict, row.best.spec)
        assert (card.measured.psnr, card.measured.identified) == (row.worst.psnr, row.worst.identified)
        assert card.measured.cost.cosine == row.cosine and card.measured.cost.loss == row.loss
        assert card.external and card.unreliable is None
        assert Card.read(card.write(tmp_path)) == card
    assert [card.claim for card in cards] == [None, CLAIM, None]
    evidence = cards[1].evidence
    assert evidence.summary_sha256 == hashlib.sha256((folder / "summary.json").read_bytes()).hexdigest()
    assert evidence.command == ("gradveil audit --defense none --defense prune:ratio=0.9 --attack standard-v2 --victims 16")
    assert audit_of(cards[1]).defenses == ("none", "prune:ratio=0.9")
    assert [card.defense for card in cards_of(folder, defenses=["precode"])] == ["precode"]
    with pytest.raises(UserError, match="no defense clip; it has none, prune:ratio=0.9 and precode"):
        cards_of(folder, defenses=["clip"])


@pytest.mark.parametrize("setting", [{"attacks": ["ig"]}, {"attacks": ["standard", "ig"]}, {"without": ["swift"]}])
def test_a_run_without_the_whole_suite_gives_no_card(audited: Callable[..., Path], setting: dict[str, Any]) -> None:
    folder = audited()
    file = folder / "audit.yaml"
    file.write_text(json.dumps(json.loads(file.read_text()) | setting))
    with pytest.raises(UserError, match="did not run the standard suite alone"):
        cards_of(folder)


def test_a_run_of_objects_gives_no_card(audited: Callable[..., Path]) -> None:
    folder = edit(audited(), lambda summary: summary.update(command=None))
    with pytest.raises(UserError, match="made of Python objects"):
        cards_of(folder)


def test_an_audit_that_cannot_tell_gives_an_unreliable_card(audited: Callable[..., Path]) -> None:
    def doubt(summary: dict[str, Any]) -> None:
        summary["defenses"][1] |= {"verdict": "cannot tell", "doubts": ["few-victims"]}
        summary["defenses"][2]["warnings"] = [{"code": "images-failed", "text": "2 images failed."}]

    _, pruned, precode = cards_of(edit(audited(), doubt))
    assert pruned.unreliable == "the audit cannot tell (few victims)" and precode.unreliable == "2 images failed"
    with pytest.raises(ValidationError, match="say why"):
        Card.model_validate_json(json.dumps(changed(pruned, unreliable=None)))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_fields_that_are_unknown_missing_or_wrong_are_refused(audited: Callable[..., Path]) -> None:
    card = cards_of(audited())[1]
    evidence = json.loads(card.evidence.model_dump_json())
    for wrong in (
        {"colour": "red"},
        {"schema": 2},
        {"external": "yes"},
        {"unreliable": "two\nlines"},
        {"evidence": evidence | {"suite": "standard"}},
        {"evidence": evidence | {"command": "rm -rf ~"}},
        {"evidence": evidence | {"summary_sha256": "0"}},
    ):
        with pytest.raises(ValidationError):
            Card.model_validate_json(json.dumps(changed(card, **wrong)))
    Card.model_validate_json(json.dumps(changed(card)))


def test_a_line_up_above_its_certificate_is_unreliable(audited: Callable[..., Path]) -> None:
    limit = {
        "mechanism": "gaussian", "noise": 1.0, "upper": 0.05, "m": 10, "advantage": 0.1, "epsilon": 1.0, "delta": 1e-5,
        "mu": None, "unit": "image", "images_per_person": 1, "releases": 1, "aggregate": 1, "sampling": "full",
        "sample_rate": 1.0, "assumptions": [], "void": [],
    }  # fmt: skip
    rate = {"rate": 1.0, "low": 0.4, "high": 1.0, "chance": 0.1}
    risk = {"m": 10, "ranks": [1] * 4, "identified": rate, "certificate": limit}
    folder = edit(audited(), lambda summary: summary["defenses"][1].update(line_up=risk))
    card = cards_of(folder)[1]
    assert card.unreliable == "the line-up contradicts the certificate"
    assert "5.0%" in Page(cards_page([card])).text


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("--victims 4", "--victims 5", "victims"),
        ("prune:ratio=0.9", "clip", "defense"),
        ("standard-v2", "ig", "attack"),
        ("--victims 4", "--victims 4 --seed 3", "seed"),
    ],
)
def test_a_command_that_says_other_things_is_refused(audited: Callable[..., Path], old: str, new: str, names: str) -> None:
    card = cards_of(audited())[1]
    evidence = card.evidence.model_copy(update={"command": card.evidence.command.replace(old, new)})
    with pytest.raises(UserError, match=f"not say the same as its other fields: {names}"):
        audit_of(card.model_copy(update={"evidence": evidence}))


@pytest.mark.parametrize("words", ["--out elsewhere", "--config audit.yaml", "--preset medical-resnet", "--plan"])
def test_a_command_with_words_that_are_no_audit_is_refused(audited: Callable[..., Path], words: str) -> None:
    card = cards_of(audited())[1]
    evidence = card.evidence.model_copy(update={"command": f"{card.evidence.command} {words}"})
    with pytest.raises(UserError, match="has no place here"):
        audit_of(card.model_copy(update={"evidence": evidence}))


def test_a_file_has_the_name_of_its_card(audited: Callable[..., Path], tmp_path: Path) -> None:
    file = cards_of(audited())[1].write(tmp_path)
    assert file.name == "prune-ratio-0.9--lenet--mnist-5k.json"
    with pytest.raises(UserError, match="is named prune-ratio-0.9--lenet--mnist-5k.json"):
        Card.read(file.rename(tmp_path / "other.json"))


# -- run again ---------------------------------------------------------------------------------------------------------


def disagreeing(card: Card, again: Card) -> list[str]:
    return [value.value for value in agreements(card, again) if value.agrees is False]


def test_agreement_is_within_the_intervals(audited: Callable[..., Path]) -> None:
    card = cards_of(audited(victims=16, leak={"none": 1.0, "prune": 0.5}))[1]
    more = cards_of(audited(victims=16, leak={"none": 1.0, "prune": 0.51}))[1]
    other = cards_of(audited(victims=16, leak={"none": 1.0, "prune": 0.0}))[1]
    fewer = cards_of(audited(victims=2, leak={"none": 1.0, "prune": 0.0}))[1]
    assert disagreeing(card, card) == [] == disagreeing(card, more)
    assert disagreeing(card, other) == ["verdict", "identified", "PSNR, dB"]
    assert "verdict" not in disagreeing(card, fewer), "fewer victims show less"
    evidence = card.evidence.model_copy(update={"data_sha256": "0" * 64})
    assert disagreeing(card, card.model_copy(update={"evidence": evidence})) == ["data's content"]


# -- the page ----------------------------------------------------------------------------------------------------------

HOSTILE = "<script>alert(1)</script>\"'></style><img src=x onerror=alert(1)>{{7*7}}"


def test_the_page_holds_every_card_as_text_and_fetches_nothing(audited: Callable[..., Path]) -> None:
    cards = cards_of(audited(), {"prune": CLAIM})
    cards[2] = cards[2].model_copy(update={"defense": HOSTILE, "claim": CardClaim(text=HOSTILE, by=HOSTILE, source=HOSTILE)})
    page = Page(cards_page(cards))
    assert len(page.of("tbody")) == 3 and "Claimed: PSNR 5.0 dB its authors, Table 1" in page.text
    assert all(card.evidence.command in page.text and card.evidence.summary_sha256 in page.text for card in cards)
    assert not page.of("img") and len(page.scripts) == 1 and "alert" not in page.scripts[0] and "{{7*7}}" in page.text
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    (policy,) = page.of("meta", **{"http-equiv": "Content-Security-Policy"})
    assert f"script-src 'sha256-{digest}'" in policy["content"] and "default-src 'none'" in policy["content"]
    assert not re.search(r"(?:src|srcset)=|@import|url\(|<link", page.source.replace("img src=x", ""))
    assert not re.search(r"\bis safe\b", page.text.replace("No verdict says that a defense is safe", ""))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")
def test_the_page_sorts_filters_and_keeps_it_in_the_address(audited: Callable[..., Path], tmp_path: Path) -> None:
    text = cards_page(cards_of(audited(victims=16)))
    file = tmp_path / "index.html"
    file.write_text(text, encoding="utf-8")
    dom, log = browse(file, tmp_path / "profile")
    assert "3 of 3 cards" in dom and "CONSOLE" not in log, "the script runs under the page's policy"
    text = text.replace('http-equiv="Content-Security-Policy"', 'name="policy"')
    probe = """
        const seen = {};
        const shown = () => [...table.tBodies].filter(c => !c.hidden).map(c => c.rows[0].cells[0].dataset.v);
        const psnr = heads.findIndex(h => h.textContent === "PSNR, dB");
        heads[psnr].firstChild.click(); seen.down = shown(); seen.sorted = heads[psnr].getAttribute("aria-sort");
        heads[psnr].firstChild.click(); seen.up = shown();
        const verdict = document.getElementById("verdict");
        verdict.value = "leaks"; verdict.dispatchEvent(new Event("input"));
        seen.leaks = shown(); seen.count = count.textContent; seen.hash = location.hash;
        verdict.value = ""; search.value = "PRUNE"; search.dispatchEvent(new Event("input")); seen.searched = shown();
        location.hash = "verdict=no+leak+shown"; restore(); seen.restored = shown();
        seen.wide = document.documentElement.scrollWidth; seen.window = innerWidth;
        document.body.dataset.seen = JSON.stringify(seen);"""
    file.write_text(text.replace("</script>", f"{{{probe}}}</script>"), encoding="utf-8")
    dom, log = browse(file, tmp_path / "profile", width=400)
    answer = re.search(r'data-seen="([^"]*)"', dom)
    assert answer, log
    seen = json.loads(html.unescape(answer[1]))
    assert seen["down"] == ["none", "prune:ratio=0.9", "precode"] and seen["up"] == seen["down"][::-1]
    assert seen["sorted"] == "descending" and seen["count"] == "2 of 3 cards"
    assert set(seen["leaks"]) == {"none", "prune:ratio=0.9"} and "verdict=leaks" in seen["hash"]
    assert seen["searched"] == ["prune:ratio=0.9"] and seen["restored"] == ["precode"]
    assert seen["wide"] <= seen["window"], "a phone does not scroll sideways"
