"""The one template environment of all pages: every value is escaped, and a missing one is an error."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gradveil.core.text import listing, plural
from gradveil.report import glossary, words


def page(template: str, **values: object) -> str:
    """The text of a file in `templates`, filled in."""
    return _TEMPLATES.get_template(template).render(**values)


def _breakable(spec: str) -> Markup:
    """A spec that may be broken between its parts and nowhere else first."""
    return Markup("<wbr>").join(re.split(r"(?<=[:,+])", spec))


def _words(command: str) -> Markup:
    """A command whose words are broken only where one does not fit in a line."""
    return Markup(" ").join(Markup('<span class="word">{}</span>').format(word) for word in command.split(" "))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"spec": _breakable, "digits": words.digits, "percent": words.percent, "seconds": words.seconds_text}
_TEMPLATES.filters |= {"terms": glossary.marked, "command": _words}
_TEMPLATES.globals |= {"words": words, "glossary": glossary, "listing": listing, "plural": plural}
