"""`gradveil certify SPEC`: what the noise of a mechanism promises, what that assumes, and what voids it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Annotated, Optional

import typer

from gradveil.certification.certificate import DELTA, LINE_UP, Certificate, percent, rounded_up
from gradveil.certification.mechanism import Releases
from gradveil.cli.options import Given
from gradveil.core.text import plain

WIDTH = 80
Number = Optional[float]  # noqa: UP045


def command(
    spec: Annotated[str, typer.Argument(help="Such as dpsgd:noise=2.4, clip:norm=1+gaussian:std=2, opacus.", metavar="SPEC")],
    releases: Given[Releases],
    line_up: Annotated[int, typer.Option(help="Candidates, one of which took part.", metavar="M")] = LINE_UP,
    delta: Annotated[float, typer.Option(help="For epsilon.", metavar="X")] = DELTA,
    risk: Annotated[Number, typer.Option(help="Give the noise for this line-up risk.", metavar="P")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Say what the noise of a mechanism with a proof promises against everyone who sees all its releases.

    Example: gradveil certify dpsgd:noise=2.4 --rounds 20
    """
    from gradveil.protection.promise import certify

    certificate = certify(spec, line_up=line_up, delta=delta, risk=risk, **releases)
    typer.echo(certificate.model_dump_json(indent=1) if as_json else _text(certificate, risk))


def _text(certificate: Certificate, risk: float | None) -> str:
    answer = []
    if risk is not None:
        noise = rounded_up(certificate.noise, 3)
        text = f"A line-up risk of {percent(risk)} needs noise of standard deviation {noise} times the clipping norm."
        answer = [_wrapped(text)]
    sentences = [_wrapped(sentence) for sentence in certificate.sentences()]
    notes = [_listed("Assumed:", certificate.assumptions), _listed("Void with:", certificate.void)]
    return _plain_lines("\n\n".join([*answer, "\n".join(sentences), _table(certificate), *notes]))


def _plain_lines(text: str) -> str:
    """Without control characters within a line."""
    return "\n".join(plain(line) for line in text.splitlines())


def _table(certificate: Certificate) -> str:
    cells = {
        "unit": certificate.unit,
        "releases": f"{certificate.releases:,}",
        "sampling": certificate.sampling,
        "noise": rounded_up(certificate.noise, 3),
        "mu": "-" if certificate.mu is None else rounded_up(certificate.mu, 3),
        "line-up": percent(certificate.upper),
        "advantage": percent(certificate.advantage),
        "epsilon": rounded_up(certificate.epsilon, 3),
    }
    widths = [max(len(name), len(value)) for name, value in cells.items()]
    rows = (cells.keys(), cells.values())
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(_wrapped(line, "- ", "  ") for line in lines)])


def _wrapped(text: str, first: str = "", later: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=later)
