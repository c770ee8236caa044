"""What `summary.json` holds, and that a file which holds something else is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gradveil import __version__
from gradveil.core.errors import UserError
from gradveil.core.results import ImageScores, Rate, ScoreRow, Statistic
from gradveil.summary import AttackRow, CaseFacts, DefenseRow, LeakTest, Recommendation, Rejection, Summary, Worst

SCHEMA = Path(__file__).parents[1] / "docs" / "reference" / "summary.schema.json"
CASE: dict[str, Any] = {
    "data": "faces", "model": "lenet", "victims": 8, "batch_size": 1, "local_steps": 1, "local_lr": 0.01,
    "trained_rounds": 0, "trained_epochs": 0, "updates": 1, "knowledge": "realistic", "budget": "quick", "seed": 0,
    "input_shape": (1, 8, 8), "num_classes": 2, "class_names": ("a", "b"),
}  # fmt: skip

TEST = LeakTest(
    statistic=9.0, null_mean=2.0, p=0.001, level=0.05, draws=999, strangers=40, untested=0, smallest_p=0.001,
    control_rate=1.0, control_null=0.02, power=1.0, detectable=0.2,
)  # fmt: skip

ADVICE = Recommendation(
    defense=None, max_loss=10.0, rejected=(Rejection(spec="clip", reasons=("leaks",)),), next_steps=()
)  # fmt: skip


def attack(spec: str, rate: float, ssim: float = 0.1, **fields: Any) -> AttackRow:
    given: dict[str, Any] = {
        "status": "ok", "adaptive": False, "knowledge": "realistic", "updates": 1, "seconds": 1.0, "iterations": 3,
        "error": None, "cell": spec, "ssim": Statistic.of([ssim]), "psnr": Statistic.of([10.0]), "scored": 8,
    }  # fmt: skip
    identified = Rate(rate=rate, low=0.0, high=1.0, chance=0.001)
    return AttackRow(**{**given, "spec": spec, "identified": identified, **fields})


def defense(spec: str, *attacks: AttackRow) -> DefenseRow:
    rate = Rate(rate=0.5, low=0.1, high=0.9, chance=0.001)
    worst = Worst(identified=rate, scored=8, attacks=2, by_victim=())
    return DefenseRow(
        spec=spec, stage=("update",), counter=(), scope="the scope", verdict="leaks", test=TEST, warnings=(),
        utility=None, gradient=None, attacks=attacks, worst=worst,
    )  # fmt: skip


@pytest.fixture
def summary() -> Summary:
    defenses = (defense("none", attack("ig", 1.0)), defense("clip", attack("ig", 0.5), attack("dlg", 0.0)))
    return Summary(
        gradveil=__version__, suite="standard-v2", command=None, scope="the scope", case=CaseFacts(**CASE),
        granted=(), not_tested=(), warnings=(), victims_needed=(), defenses=defenses, baseline=ScoreRow(),
        recommendation=ADVICE,
    )  # fmt: skip


def write(folder: Path, content: Any) -> Path:
    (folder / "summary.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_summary_is_read_back_as_it_was_written(summary: Summary, tmp_path: Path) -> None:
    assert Summary.read(write(tmp_path, summary.model_dump_json())) == summary
    stored = json.loads(summary.model_dump_json())
    assert stored["schema"] == 2 and stored["gradveil"] == __version__ == "0.2.0"
    assert stored == json.loads(json.dumps(summary.model_dump())), "the same from Python and in the file"


def test_fields_of_the_design_stand_under_their_names(summary: Summary) -> None:
    stored = summary.model_dump()
    assert {"schema", "gradveil", "suite", "case", "defenses", "baseline", "recommendation"} <= stored.keys()
    case = "data model victims batch_size local_steps trained_rounds knowledge seed"
    assert set(case.split()) <= stored["case"].keys()
    row = stored["defenses"][1]
    assert {"spec", "stage", "counter", "claimed", "utility", "gradient", "attacks", "worst", "test", "verdict"} <= row.keys()
    named = "statistic null_mean p level draws strangers untested control_rate detectable"
    assert set(named.split()) <= row["test"].keys()
    figures = "psnr ssim mse lpips asr identified"
    named = f"spec status adaptive claimed knowledge against updates scored {figures} label_accuracy seconds iterations"
    assert set(named.split()) <= row["attacks"][0].keys()
    assert set(f"{figures} by_victim".split()) <= row["worst"].keys()
    assert list(row["attacks"][0]["psnr"]) == ["mean", "std", "min", "max"]
    assert list(row["worst"]["identified"]) == ["rate", "low", "high", "chance"]


def test_the_published_schema_is_that_of_the_models() -> None:
    wanted = json.dumps(Summary.model_json_schema(mode="serialization"), indent=1) + "\n"
    remedy = "python -c 'import json; from gradveil.summary import Summary; "
    remedy += 'print(json.dumps(Summary.model_json_schema(mode="serialization"), indent=1))\''
    assert SCHEMA.read_text(encoding="utf-8") == wanted, f"write it again: {remedy} > {SCHEMA.name}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 1}, "has schema 1, this version reads schema 2. Run the audit again"),
        ({"schema": 3}, "has schema 3, this version reads schema 2. Update gradveil"),
        ({"schema": "2"}, "schema: input should be a valid integer"),
        ({"defenses": {}}, "defenses: input should be a valid array"),
        ({"defenses": [{"spec": "a"}]}, "defenses.0.stage: field required"),
        ({"case": {**CASE, "victims": "8"}}, "case.victims: input should be a valid integer"),
        ({"baseline": {"asr": float("nan")}}, "baseline.asr: input should be a finite number"),
        ({"baseline": {"asr": True}}, "baseline.asr: input should be a valid number"),
        ({"scope": None}, "scope: input should be a valid string"),
        ({"recommendation": None}, "recommendation: input should be"),
        ({"recommendation": {**ADVICE.model_dump(), "rejected": []}}, "each audited defense is either recommended or rejected"),
        ({"recommendation": {**ADVICE.model_dump(), "rejected": [], "defense": "clip"}}, "its verdict is not `no leak shown`"),
    ],
)
def test_what_is_no_summary_is_refused_in_one_line(summary: Summary, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        Summary.read(write(tmp_path, {**json.loads(summary.model_dump_json()), **change}))
    assert says in str(error.value) and "\n" not in str(error.value) and "summary.json" in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 5000, "\x00", '{"schema": 2}', "{}"])
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="summary.json is damaged") as error:
        Summary.read(write(tmp_path, text))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="no summary.json"):
        Summary.read(tmp_path / "nowhere")


def test_fields_of_a_later_version_are_ignored_and_terms_of_a_case_kept(summary: Summary, tmp_path: Path) -> None:
    stored = json.loads(summary.model_dump_json())
    stored |= {"later": 1, "case": {**stored["case"], "mode": "train"}}
    again = Summary.read(write(tmp_path, stored))
    assert "later" not in again.model_dump() and again.case.model_dump()["mode"] == "train"


def test_nothing_in_a_summary_can_be_changed(summary: Summary) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        summary.defenses[0].verdict = "unrefuted"  # type: ignore[misc]


def test_attacks_are_ranked_by_what_they_got_and_those_that_did_not_run_are_last() -> None:
    rows = (
        attack("failed", 1.0, status="failed"),
        attack("alike", 0.5, ssim=0.9),
        attack("fed", 1.0, against="fed"),
        attack("sure", 0.75),
        attack("unlike", 0.5),
    )
    row = defense("clip", *rows)
    assert [r.spec for r in row.ranked] == ["sure", "alike", "unlike", "failed"]
    assert row.best is not None and row.best.spec == "sure"
    assert defense("clip", attack("failed", 1.0, status="failed")).best is None


def test_a_statistic_leaves_no_value_out() -> None:
    known = Statistic.of([1.0, 2.0, 6.0])
    assert known is not None and known.model_dump() == pytest.approx(
        {"mean": 3.0, "std": (14 / 3) ** 0.5, "min": 1.0, "max": 6.0}
    )
    assert Statistic.of([1.0, None]) is None and Statistic.of([]) is None


def test_an_image_that_failed_is_not_recognised_and_identity_counts_before_likeness() -> None:
    scores: dict[str, Any] = {"psnr": 9.0, "mse": 0.1, "lpips": None, "rank": 1}
    alike = ImageScores(victim=0, image=0, **scores, ssim=0.9, identified=False, failed=False)
    named = ImageScores(victim=0, image=1, **scores, ssim=0.1, identified=True, failed=False)
    lost = ImageScores(victim=0, image=2, **scores, ssim=0.9, identified=False, failed=True)
    assert alike.recognisable and not named.recognisable and not lost.recognisable
    assert max([alike, named, lost], key=lambda image: image.strength) is named
