"""`gradveil card` and `gradveil check`: from an audit to a card, and back to the audit."""

from __future__ import annotations

import json


def test_a_card_is_written_and_its_audit_agrees_when_it_is_run_again(gradveil, archive, tmp_path):
    run, cards, again = (str(tmp_path / name) for name in ("run", "cards", "again"))
    audit = ("--data", archive, "--defense", "clip", "--victims", "2", "--line-up", "4", "--workers", "0", "--quiet")
    assert gradveil("audit", *audit, "--out", run)[0] == 0
    code, out, err = gradveil(
        "card", run, "--defense", "clip", "--claim", "nothing leaks", "--by", "its authors", "--out", cards
    )
    assert code == 2 and out == "" and err.count("\n") == 1 and "--source" in err
    stated = ("--claim", "nothing leaks", "--by", "its authors", "--source", "Table 1")
    code, out, err = gradveil("card", run, "--defense", "clip", *stated, "--out", cards)
    assert (code, err) == (0, "") and "clip, leaks" in out
    (file,) = (tmp_path / "cards").iterdir()
    card = json.loads(file.read_text())
    assert card["external"] is True and card["claim"]["source"] == "Table 1" and card["measured"]["verdict"] == "leaks"

    code, out, err = gradveil("check", str(file), "--out", again, "--workers", "0", "--accept")
    assert code == 0 and "values that were compared agree." in out and "not compared" in out
    assert json.loads(file.read_text()) == card | {"external": False}, "checked by the project now"

    card["measured"]["verdict"], card["measured"]["identified"]["rate"] = "no leak shown", 0.0
    file.write_text(json.dumps(card))
    code, out, _ = gradveil("check", str(file), "--out", again, "--workers", "0", "--accept")
    assert code == 1 and "Does not agree with the card: verdict and identified." in " ".join(out.split())
    assert json.loads(file.read_text())["external"] is True

    code, out, _ = gradveil("check", str(file), "--victims", "1", "--workers", "0")
    assert code == 1 and "Reduced: 1 of 2 victims" in " ".join(out.split())


def test_what_is_no_card_is_told_in_one_line(gradveil, tmp_path):
    file = tmp_path / "card.json"
    for text in ("{}", "[]", "no JSON"):
        file.write_text(text)
        code, out, err = gradveil("check", str(file))
        assert code == 2 and out == "" and err.count("\n") == 1 and "card.json" in err
    code, _, err = gradveil("card", str(tmp_path))
    assert code == 2 and "no summary.json" in err and err.count("\n") == 1
