"""The page that explains verdicts and warnings has a section for each of them, where reports link to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from gradveil.report import words
from gradveil.summary import NoticeCode, RejectionCode, Verdict

PAGE = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text(encoding="utf-8")


def test_each_verdict_and_each_warning_has_a_section_with_words_in_it() -> None:
    sections = dict(re.findall(r"^## ([^\n]+)\n\n(.+?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert set(sections) == {"The test", "line-up", "recommendation", *get_args(Verdict), *get_args(NoticeCode)}
    codes = re.findall(r"^\| `([a-z-]+)` \|", sections["recommendation"], re.MULTILINE)
    assert codes == list(get_args(RejectionCode)), "each reason against a defense is explained"
    assert all(len(text.split()) > 8 for text in sections.values())
    order = [title for title in sections if title in get_args(Verdict)]
    assert order == list(get_args(Verdict)), "in order of precedence"


def test_links_of_reports_lead_to_these_sections() -> None:
    anchors = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}
    for subject in (*get_args(Verdict), *get_args(NoticeCode), "recommendation", "line-up"):
        page, _, anchor = words.explained(subject).partition("#")
        assert page.endswith("/docs/verdicts.md") and anchor in anchors
