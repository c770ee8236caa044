"""Text in the width of the terminal, 80 columns where it has none."""

import re
import shutil
import textwrap

NARROWEST, WIDEST = 40, 100


def screen() -> int:
    """Columns of the terminal, or of COLUMNS; lines of prose are not longer than WIDEST."""
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def hanging(head: str, text: str) -> str:
    """A text behind its head, with later lines below its first word. Names are not broken."""
    return textwrap.fill(
        text,
        screen(),
        initial_indent=head,
        subsequent_indent=" " * min(len(head), screen() // 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def paragraphs(text: str) -> str:
    """Paragraphs, and the items of numbered lists, each as wide as the terminal."""
    blocks = []
    for paragraph in re.split(r"\n\s*\n", text):
        items = [re.findall(r"^(\d+\. )?(.*)", item, re.DOTALL)[0] for item in re.split(r"\n(?=\d+\. )", paragraph)]
        blocks.append("\n".join(hanging(number, " ".join(item.split())) for number, item in items))
    return "\n\n".join(blocks)
