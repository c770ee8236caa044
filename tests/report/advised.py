"""A summary that a test has made up, completed by what the verdict derives from its rows."""

from __future__ import annotations

from typing import Any

from gradveil import defenses
from gradveil.auditing.advice import Evidence, advise
from gradveil.auditing.spec import AuditSpec
from gradveil.core.errors import UserError
from gradveil.defenses.base import Defense
from gradveil.summary import DefenseRow, Recommendation, VictimsNeeded


def advised(summary: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The same with doubts where the verdict is `cannot tell`, and with the recommendation for these rows."""
    rows = []
    for row in summary["defenses"]:
        if isinstance(row, DefenseRow):
            rows.append(row)
            continue
        doubts = row.get("doubts") or ["no-attack-ran" if row["test"] is None else "few-victims"]
        row["doubts"] = doubts if row["verdict"] == "cannot tell" else []
        rows.append(DefenseRow.model_validate(row, strict=False))
    return {**summary, "recommendation": recommendation(rows, summary, **settings).model_dump()}


def recommendation(rows: list[DefenseRow], summary: dict[str, Any], **settings: Any) -> Recommendation:
    """Of an audit of the embedded data with these rows."""
    case = summary["case"]
    spec = AuditSpec(victims=case["victims"], batch_size=case["batch_size"], **settings)
    needed = [VictimsNeeded.model_validate(n) for n in summary["victims_needed"]]
    methods = {row.spec: method(row.spec) for row in rows}
    return advise(Evidence(spec, rows, methods, needed, case["num_classes"], 2500))


def method(text: str) -> Defense:
    """A name that no method has stands for a defense of a user."""
    try:
        return defenses.parse(text)
    except UserError:
        return Defense()
