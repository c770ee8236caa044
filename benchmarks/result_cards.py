"""Write docs/results/cards/: a result card (JSON) per defense of stored audits, and the page made of all cards.

    gradveil audit --defense … --victims 16 --seed 100 --out RUN
    python benchmarks/result_cards.py RUN [RUN …]

Without a run, only the page is written again: after a card was added, changed or removed. Cards of these runs are marked as
run by the project; `gradveil card` writes the cards of others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pydantic import TypeAdapter

from gradveil.report.cards import CardClaim, cards_of, cards_page, read_cards
from gradveil.storage.files import write_text
from gradveil.storage.reading import read_yaml

CARDS = Path("docs/results/cards")
CLAIMS = Path(__file__).with_name("claims.yaml")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("runs", type=Path, nargs="*")
    arguments.add_argument("--out", type=Path, default=CARDS)
    options = arguments.parse_args()
    for run in options.runs:
        for card in cards_of(run, published_claims(), external=False):
            print(card.write(options.out))
    write_text(options.out / "index.html", cards_page(read_cards(options.out)))
    print(options.out / "index.html")


def published_claims() -> dict[str, CardClaim]:
    """Claims by the name of a defense."""
    return TypeAdapter(dict[str, CardClaim]).validate_python(read_yaml(CLAIMS))


if __name__ == "__main__":
    main()
