"""A whole tune on a tiny network: the setting that is found, confirmed on fresh victims, written, and told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import gradveil as gv
from gradveil.auditing import line_up
from gradveil.auditing.case import Case
from gradveil.auditing.fit import Fitted
from gradveil.auditing.limits import Execution
from gradveil.auditing.progress import Display
from gradveil.auditing.run import Stopped
from gradveil.auditing.spec import make_spec
from gradveil.auditing.tuning import choice
from gradveil.auditing.tuning import run as tuning_run
from gradveil.auditing.tuning.bracket import Standing
from gradveil.auditing.tuning.results import Basis, Finding, TuneSummary
from gradveil.auditing.tuning.run import _family, _Tune, run_tune
from gradveil.auditing.tuning.spec import TuneSpec
from gradveil.certification.certificate import Certificate
from gradveil.certification.line_up import LineUpRisk
from gradveil.cli import main
from gradveil.core.errors import UserError
from gradveil.core.results import Rate
from gradveil.report.tune_report import print_tune
from gradveil.summary import DefenseRow, Summary

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "tune.schema.json"
TRAINING = {"seeds": 2, "rounds": 10, "lr_grid": "1", "clients": 6, "images": 10, "lr": 0.2, "defended": 1}
ATTACKS = ["linear", "noise-likelihood:steps=1"]


def two_classes() -> tuple[torch.Tensor, torch.Tensor]:
    """Coarse images of two classes: the left half of the second is brighter."""
    random, y = torch.Generator().manual_seed(0), torch.arange(300) % 2
    waves = torch.rand(300, 1, 3, 3, generator=random).repeat_interleave(2, 2).repeat_interleave(2, 3)
    bright = y[:, None, None, None] * torch.tensor([1.0, 0.0]).repeat_interleave(3)
    return 0.6 * waves + 0.4 * bright, y


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 2))


def spec(**settings: object) -> TuneSpec:
    values = {"data": two_classes(), "model": network(), "defenses": ["gaussian:relative=30.0"], "attacks": ATTACKS}
    tune = make_spec({**values, "utility": TRAINING, "strengths": 3, "max_loss": 100.0, **settings}, TuneSpec)
    assert isinstance(tune, TuneSpec)
    return tune


class Stopping(Display):
    """Ctrl-C after a number of cells."""

    def __init__(self, after: int):
        self.left = after

    def end(self, cell: object, stored: object) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> gv.TuneReport:
    """Stopped in the middle of its second audit, then done by the same call."""
    out = tmp_path_factory.mktemp("tune") / "run"
    with pytest.raises(Stopped, match="goes on from there"):
        run_tune(spec(), Execution(out=out), Stopping(9))
    before = {file: file.stat().st_mtime_ns for file in (out / "cells").iterdir()}
    wanted = {name: getattr(spec(), name) for name in ("strengths", "max_loss", "utility")}
    report = gv.tune(two_classes(), network(), "gaussian:relative=30.0", ATTACKS, out=out, quiet=True, **wanted)
    assert len(before) == 9 and all(file.stat().st_mtime_ns == time for file, time in before.items()), "no cell is done twice"
    return report


def test_the_cheapest_setting_that_survives_is_found_between_one_that_leaks_and_a_stronger_one(tuned: gv.TuneReport) -> None:
    summary = tuned.summary
    standings = {setting.spec: setting.standing for setting in summary.settings}
    assert standings == {"gaussian:relative=3.0": "leaks", "gaussian:relative=9.5": "holds", "gaussian:relative=30.0": "holds"}
    assert summary.control.verdict == "leaks" and summary.frontier[0] == "none" and summary.recommended in summary.frontier
    (family,) = summary.families
    assert (family.weakest, family.leaking) == ("gaussian:relative=9.5", "gaussian:relative=3.0")
    best = summary.best
    assert best is not None and best.loss == min(s.loss for s in summary.settings if s.loss is not None)
    assert best.low is not None and best.high is not None and best.low <= (best.loss or 0.0) <= best.high
    leaking = summary.settings[0]
    assert leaking.loss is None and leaking.reasons == ("leaks",), "the accuracy of what leaks is not measured"


def test_the_winner_held_on_victims_that_nobody_had_seen(tuned: gv.TuneReport) -> None:
    best = tuned.summary.best
    assert best is not None and best.fresh is not None and best.fresh.verdict == "no leak shown"
    first, fresh = Case(spec().audit()), Case(spec().fresh())
    assert first.id != fresh.id and first.model_hash == fresh.model_hash
    seen = set(first.victims.flatten().tolist())
    assert not seen & set(fresh.victims.flatten().tolist()) and not seen & set(fresh.strangers.tolist())
    again = gv.Report.load(tuned.folder / "fresh")
    assert "16 victims beyond the first 16" in again.summary.scope
    assert best.fresh.p == next(row.test.p for row in again.summary.defenses if row.spec == best.spec and row.test)
    with pytest.raises(UserError, match="and as many of the 80 before them"):
        Case(spec(victims=80).fresh())


def test_of_a_setting_that_leaks_by_the_first_attacks_no_others_are_asked(tmp_path: Path) -> None:
    suite = {"attacks": ["standard"], "without": ["swift", "features"], "line_up": 0, "utility": None}
    finished = run_tune(spec(**suite, strengths=2), Execution(out=tmp_path / "run"))
    assert {setting.spec: setting.verdict for setting in finished.tuned.settings} == {
        "gaussian:relative=3.0": "leaks",
        "gaussian:relative=30.0": "no leak shown",
    }
    asked = {row.spec: {attack.spec for attack in row.attacks} for row in finished.searched.defenses}
    assert asked["gaussian:relative=3.0"] == {"linear", "rgap", "april", "token-span"} == asked["none"]
    assert asked["gaussian:relative=30.0"] == asked["none"] | {"patch-span", "noise-likelihood"}
    assert "What leaks was attacked only until that was seen" in finished.tuned.notes[0]


def test_all_files_say_the_same(tuned: gv.TuneReport) -> None:
    folder, summary = tuned.folder, tuned.summary
    assert TuneSummary.read(folder) == summary == gv.TuneReport.load(folder).summary
    assert tuned.searched.summary.recommendation.defense == summary.recommended == gv.Report.load(folder).export().defense
    assert tuned.protection.defense == summary.recommended and tuned.protection.verdict == "no leak shown"
    x, y = two_classes()
    gv.protect(network(), folder / "protection.json", data=(x, y)).backward(x[:1], y[:1])
    (folder / "tune.html").unlink()
    assert main(["report", str(folder), "--quiet"]) == 0 and (folder / "tune.html").is_file()
    frame = tuned.to_frame()
    assert list(frame["spec"]) == [s.spec for s in summary.settings] and "identified_high" in frame
    assert summary.recommended in tuned._repr_html_() and tuned.plot().axes


def test_the_page_stands_alone_and_shows_the_frontier_with_intervals(tuned: gv.TuneReport) -> None:
    page = (tuned.folder / "tune.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page and not re.search(r"<(script|img|link|iframe)\b", page)
    assert set(re.findall(r'href="(?!#|https://github.com/)([^"]+)"', page)) == {"report.html", "fresh/report.html"}
    assert all((tuned.folder / name).is_file() for name in ("report.html", "fresh/report.html"))
    points = re.findall(r'<polyline class="frontier" points="([^"]+)"', page)
    assert len(points) == 2  # for a wide screen and for a narrow one
    assert all(len(line.split()) == len(tuned.summary.frontier) for line in points)
    assert page.count('class="whisker"') == 6 and tuned.summary.text.split(".")[0] in page


def test_the_terminal_shows_all_of_it_in_80_columns(tuned: gv.TuneReport) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_tune(tuned, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "… fresh victims" in text and "Recommended: gaussian" in text
    assert all(setting.spec in text for setting in tuned.summary.settings), "no name is broken"


def test_the_published_schema_is_that_of_the_models() -> None:
    wanted = json.dumps(TuneSummary.model_json_schema(mode="serialization"), indent=1) + "\n"
    assert SCHEMA.read_text(encoding="utf-8") == wanted


# -- what a standing rests on -----------------------------------------------------------------------------------------------


def rows(tuned: gv.TuneReport, *rates: float | None) -> list[DefenseRow]:
    """The control and a setting of which the test cannot tell, with these shares of line-ups that succeeded."""
    chosen = []
    for row, rate in zip(tuned.searched.summary.defenses, rates, strict=False):
        line_up = None
        if rate is not None:
            identified = Rate(rate=rate, low=max(0.0, rate - 0.2), high=min(1.0, rate + 0.2), chance=0.01)
            line_up = LineUpRisk(m=100, identified=identified, ranks=(1,) * 16)
        chosen.append(
            row.model_copy(update={"verdict": "cannot tell", "doubts": ("control-does-not-leak",), "line_up": line_up})
        )
    return chosen


@pytest.mark.parametrize(
    ("control", "setting", "risk", "expected"),
    [
        (1.0, 0.0, None, ("holds", "line-up")),
        (1.0, 0.5, None, ("leaks", "line-up")),
        (0.0, 0.0, None, ("unknown", "nothing")),
        (None, None, None, ("unknown", "nothing")),
        (1.0, 0.1, 0.2, ("holds", "certificate")),
        (1.0, 0.9, 0.2, ("leaks", "line-up")),
        (None, None, 0.2, ("holds", "certificate")),
    ],
)
def test_where_the_picture_cannot_tell_the_line_up_or_the_proof_decides(
    tuned: gv.TuneReport, control: float | None, setting: float | None, risk: float | None, expected: tuple[str, str]
) -> None:
    undefended, row = rows(tuned, control, setting)
    assert choice.standing_of(row, undefended, risk) == expected


@pytest.mark.parametrize("doubt", ["no-attack-ran", "few-strangers", "few-victims", "attacks-failed"])
@pytest.mark.parametrize("risk", [None, 0.2])
def test_neither_line_up_nor_proof_stands_in_for_an_audit_that_was_too_small_or_failed(
    tuned: gv.TuneReport, doubt: str, risk: float | None
) -> None:
    undefended, row = rows(tuned, 1.0, 0.0)
    row = row.model_copy(update={"doubts": (doubt,)})
    assert choice.standing_of(row, undefended, risk) == ("unknown", "nothing")
    row = row.model_copy(update={"doubts": ("control-leaks-little", doubt)})
    assert choice.standing_of(row, undefended, risk)[0] == "holds"


def test_no_proof_is_told_of_the_control(tuned: gv.TuneReport) -> None:
    undefended, _ = rows(tuned, 0.0, 0.0)
    assert choice.standing_of(undefended, undefended, 0.2) == ("unknown", "nothing")
    undefended, _ = rows(tuned, 1.0, 0.0)
    assert choice.standing_of(undefended, undefended, 0.2) == ("leaks", "line-up")


def test_a_proof_is_contradicted_by_more_than_it_allows_to_the_line_up_that_was_played(tuned: gv.TuneReport) -> None:
    undefended, row = rows(tuned, 1.0, 0.3)
    assert row.line_up is not None and row.line_up.identified.low == pytest.approx(0.1)
    for m, standing in ((20, "holds"), (1001, "leaks")):
        proof = gv.certify("dpsgd:noise=0.7", rounds=1, line_up=m)
        played = row.model_copy(update={"line_up": row.line_up.model_copy(update={"m": m, "certificate": proof})})
        assert choice.standing_of(played, undefended, 0.05)[0] == standing


def test_a_small_audit_recommends_nothing_however_much_may_be_promised(tmp_path: Path) -> None:
    tune = run_tune(spec(defenses=["dpsgd:noise=0.01"], risk=0.9, victims=2), Execution(out=tmp_path / "run")).tuned
    assert tune.recommended is None and [s.standing for s in tune.settings] == ["unknown"]
    assert "with so few victims a leak could have stayed unseen" in tune.families[0].text


def test_without_any_attack_a_proof_recommends_nothing_and_the_control_has_none(tmp_path: Path) -> None:
    wanted = spec(defenses=["dpsgd:noise=0.01"], risk=0.05, victims=2, attacks=["rgap"], utility=None)
    tune = run_tune(wanted, Execution(out=tmp_path / "run")).tuned
    assert (tune.control.standing, tune.control.basis) == ("unknown", "nothing") and tune.recommended is None


def test_a_line_up_that_was_not_played_is_not_spoken_of(tuned: gv.TuneReport) -> None:
    undefended, row = rows(tuned, None, None)
    basis = choice.standing_of(row, undefended, 0.2)
    finding = Finding.of(row, *basis)
    assert basis == ("holds", "certificate") and choice._rests_on(finding).endswith("rests on the proof alone")


def test_a_promised_risk_is_kept_by_the_weakest_noise_that_keeps_it(tmp_path: Path) -> None:
    wanted = spec(defenses=["dpsgd:noise=0.01", "clip:norm=2.0+gaussian:std=1.0", "prune"], risk=0.05)
    tune = _Tune(wanted, Execution(out=tmp_path / "run"), Display())
    assert tune.releases == 1
    assert [family.family for family in tune.left_out] == ["prune"] and "promises nothing" in tune.left_out[0].text
    for bracket in tune.brackets:
        first = bracket.next()
        assert first is not None
        assert 0.048 < gv.certify(first, rounds=1).upper <= 0.05
        bracket.record(first, "holds")
        assert bracket.next() is None, "a weaker one would break the promise"


def promised(tmp_path: Path, **utility: object) -> _Tune:
    local = {"victims": 8, "batch_size": 4, "local_lr": 0.1, "utility": {**TRAINING, "defended": "all", **utility}}
    return _Tune(spec(defenses=["dpsgd:noise=0.01"], risk=0.05, **local), Execution(out=tmp_path / "run"), Display())


def test_a_promise_counts_the_epochs_of_the_training_that_measures_the_cost(tmp_path: Path) -> None:
    once, often = (promised(tmp_path, local_epochs=epochs, batch_size=size) for epochs, size in ((1, 10), (4, 5)))
    assert once.releases == often.releases == 10
    for tune, epochs in ((once, 1), (often, 4)):
        first = tune.brackets[0].next()
        assert first is not None and 0.048 < gv.certify(first, rounds=10, local_epochs=epochs).upper <= 0.05


def test_a_promise_for_poisson_batches_is_counted_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def certify(defense: str, **releases: object) -> Certificate:
        asked.append(releases)
        return gv.certify("dpsgd:noise=3", rounds=1)

    monkeypatch.setattr(line_up, "certify", certify)
    promised(tmp_path, sampling="poisson", batch_size=5, local_epochs=2)
    wanted = {"rounds": 10, "local_epochs": 2, "sampling": "poisson", "batch_size": 5, "images": 10}
    assert asked and all(wanted.items() <= releases.items() for releases in asked)
    (left_out,) = promised(tmp_path, sampling="poisson", batch_size=5, partition="dirichlet:alpha=1").left_out
    assert "different numbers of images" in left_out.text


def test_a_cost_that_cannot_be_measured_is_refused_before_the_search(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 1))
    continuous = {"data": (two_classes()[0], torch.rand(300, 1)), "model": model, "loss": "regression"}
    with pytest.raises(UserError, match="targets of this data are no classes"):
        run_tune(spec(**continuous), Execution(out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("fails", "late"), [(True, False), (False, True)])
def test_what_was_not_audited_again_is_told_as_such_in_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, late: bool
) -> None:
    judged = _Tune._standing

    def standing(tune: _Tune, summary: Summary, row: DefenseRow) -> tuple[Standing, Basis]:
        on_fresh = summary is tune.fresh and not row.control
        return ("leaks", "line-up") if fails and on_fresh else judged(tune, summary, row)

    monkeypatch.setattr(_Tune, "_standing", standing)
    monkeypatch.setattr(_Tune, "_late", lambda tune, share: late and share == 1.0)
    monkeypatch.setattr(choice, "MOST_FRESH", 1)
    finished = run_tune(spec(utility={**TRAINING, "seeds": 1}), Execution(out=tmp_path / "run"))
    tune, rejected = finished.tuned, finished.searched.recommendation.rejected
    failed = [s.spec for s in tune.settings if s.fresh]
    assert tune.recommended is None and len(failed) == fails
    assert {r.spec: r.reasons for r in rejected} == {s.spec: s.reasons for s in tune.settings}
    assert {code for s in tune.settings for code in s.reasons} == {
        "leaks",
        "not-confirmed",
        *(["failed-again"] if fails else []),
    }
    why = "1 other setting had not held there" if fails else "there was no time"
    assert tune.text.endswith(f"but it was not audited again on fresh victims: {why}.")
    (step,) = tune.next_steps
    assert step.code == ("complete-evidence" if fails else "more-time")
    assert not fails or step.reason.startswith(f"{failed[0]} did not hold on fresh victims.")


def test_with_few_minutes_fewer_defenses_are_searched_rather_than_attacked_by_less(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fitted(case: Case, minutes: float, workers: int, until: float, least_victims: int) -> Fitted:
        assert least_victims == 16  # of one image each: as many as a recommendation needs
        families = {_family(str(defense)) for defense in case.defenses} - {""}
        asked.append(len(families))
        if len(families) == 3:
            raise UserError("--minutes 1 is too little")
        without = ("noise-likelihood",) if len(families) > 1 else ("expectation",)
        return Fitted(Case(case.spec.model_copy(update={"without": without})), "a note")

    monkeypatch.setattr(tuning_run, "fit", fitted)
    wanted = spec(defenses=["gaussian:std=0.1", "laplace:scale=0.1", "prune:ratio=0.9"], attacks=["standard"])
    tune = _Tune(wanted, Execution(minutes=1.0, workers=0), Display())
    assert asked == [3, 2, 1]
    assert [scale.name for scale in tune.spec.scales] == ["gaussian"]
    assert [(family.family, "no time" in family.text) for family in tune.left_out] == [("laplace", True), ("prune", True)]


def test_a_tune_that_is_resumed_keeps_the_defenses_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fitted(case: Case, minutes: float, workers: int, until: float, least_victims: int) -> Fitted:
        without = ("swift",) if any("prune" in str(text) for text in case.defenses) else ()
        return Fitted(Case(case.spec.model_copy(update={"without": without})), "a note")

    monkeypatch.setattr(tuning_run, "fit", fitted)
    wanted = spec(defenses=["gaussian:std=30.0", "laplace:scale=30.0", "prune:ratio=0.9"])
    execution = Execution(minutes=5.0, workers=0, out=tmp_path / "run")
    first = _Tune(wanted, execution, Display())
    first._attacked(["gaussian:std=30.0", "laplace:scale=30.0"])
    first._attacked(["laplace:scale=100.0"])  # the search for gaussian has ended before
    again = _Tune(wanted, execution, Display())
    assert [scale.name for scale in again.spec.scales] == ["gaussian", "laplace"]
    assert [family.family for family in again.left_out] == ["prune"]
