"""The words that a reader of a page may not have met, each explained where it stands and once more at the end."""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from markupsafe import Markup, escape

_FILE = Path(__file__).parent / "templates" / "glossary.yaml"


@dataclass(frozen=True)
class Term:
    """One word, the pattern by which it is seen in a sentence (none: it stands in too many), and what it means."""

    name: str
    pattern: str
    text: str

    @property
    def anchor(self) -> str:
        return "term-" + re.sub(r"\W+", "-", self.name.lower()).strip("-")


TERMS = tuple(Term(**entry) for entry in yaml.safe_load(_FILE.read_text(encoding="utf-8")))
BY_NAME = {term.name: term for term in TERMS}
_PLACES = (rf"(?P<t{i}>(?<![\w&#:=/-])(?:{t.pattern})(?![\w=:/-]))" for i, t in enumerate(TERMS) if t.pattern)
_PATTERN = re.compile("|".join(_PLACES))


def marked(text: str) -> Markup:
    """The text, escaped, with the first place of each term linked to its explanation."""
    seen = set[str]()

    def link(match: re.Match[str]) -> str:
        term = TERMS[int((match.lastgroup or "t0")[1:])]
        if term.name in seen:
            return match[0]
        seen.add(term.name)
        return f'<a class="term" href="#{term.anchor}" data-tip="{escape(term.text)}">{match[0]}</a>'

    # Escaping leaves no letter of a term inside an entity: those begin with & or #, which no term follows.
    return Markup(_PATTERN.sub(link, str(escape(text))))
