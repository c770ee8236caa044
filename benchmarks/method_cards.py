"""Write docs/methods/: a page per defense, with its text, its settings, its effect on a few images, and its measurements.

    python benchmarks/method_cards.py --audit RUN [RUN …]

`--audit` names folders of audits over the defenses (`gradveil audit … --out RUN`); the pages show their numbers, dates
and commands. All text comes from the docstring of the defense. `--text` writes only the text and the settings anew, and
`--measured` only the measurements, where an audit has them; both keep the rest of each page.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import time
from pathlib import Path
from typing import Annotated, get_args, get_origin

import torch
from pydantic.fields import FieldInfo
from result_cards import published_claims

from gradveil import data as data_sets
from gradveil import models
from gradveil.attacks.suite import accepted_counters
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.defenses import Defense, parse, registry
from gradveil.defenses.base import Setup
from gradveil.summary import Summary

IMAGES = 6
MEASURED = "## Measured here"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--audit", type=Path, nargs="+", default=[], help="folders of audits over the defenses")
    arguments.add_argument("--out", type=Path, default=Path("docs/methods"))
    arguments.add_argument("--text", action="store_true", help="write only text and settings anew")
    arguments.add_argument("--measured", action="store_true", help="write only measurements anew")
    arguments.add_argument("names", nargs="*", help="defenses; all without")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    summaries = [Summary.read(folder) for folder in options.audit]
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or [n for n in registry.names() if n != "none"]:
        page = options.out / f"{name}.md"
        if options.text:
            rest = page.read_text(encoding="utf-8").partition("## Cost")[2]
            page.write_text("\n".join([*text(name), "## Cost"]) + rest, encoding="utf-8")
        elif options.measured:
            lines = measurements(name, summaries)
            if lines[2:]:
                kept = page.read_text(encoding="utf-8").partition(MEASURED)[0]
                page.write_text(kept + "\n".join([*lines, *published(name)]) + "\n", encoding="utf-8")
        else:
            card(name, summaries, options.out)
        print(options.out / f"{name}.md", flush=True)


def card(name: str, summaries: list[Summary], out: Path) -> None:
    cls = registry[name]
    picture, seconds = effect(parse(name), out / f"{name}.png")
    lines = [*text(name), "## Cost", ""]
    lines += [f"One round on one MNIST digit with LeNet at the default settings: {seconds:.2f} s on one core.", ""]
    if picture:
        lines += ["## What the network is fed", "", f"![originals above, what {name} feeds below]({name}.png)", ""]
    lines += ["## What breaks it", ""]
    counters = ", ".join(f"`{c}`" for c in accepted_counters(cls))
    lines += [f"Counters: {counters}." if counters else "No counter is known: unrefuted, which is not the same as harmless."]
    lines += ["", *measurements(name, summaries), *published(name)]
    (out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def measurements(name: str, summaries: list[Summary]) -> list[str]:
    return [MEASURED, "", *(line for one in summaries for line in measured(name, one))]


def published(name: str) -> list[str]:
    claim = published_claims().get(name)
    return ["", f"Claimed: {claim.text} {claim.by}, {claim.source}."] if claim else []


def text(name: str) -> list[str]:
    """The head of a page: the docstring with its example, the stages, and the settings with their explanations."""
    cls = registry[name]
    about, _, example = inspect.cleandoc(cls.__doc__ or "").partition("\n\nExample:\n")
    about, _, explained = about.partition("\n\nArgs:\n")
    code = example.strip().removeprefix(">>> ")
    lines = [f"# {name}", "", about, "", f"Stage: {', '.join(cls().stages) or 'none'}.", "", "```python", code, "```"]
    return [*lines, "", "## Settings", "", *settings_table(cls, explanations(explained)), ""]


def explanations(section: str) -> dict[str, str]:
    """Setting → explanation, from the section `Args` of a docstring."""
    joined = re.sub(r"\n {8}\s*", " ", section)  # an entry may go on in further lines
    entries = [line.strip().partition(":") for line in joined.splitlines()]
    return {name.strip(): meaning.strip() for names, _, meaning in entries for name in names.split(",")}


def settings_table(cls: type[Defense], explained: dict[str, str]) -> list[str]:
    fields = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    if not fields:
        return ["None."]
    rows = ["| setting | default | type | meaning |", "|---|---|---|---|"]
    for field in fields:
        default = field.default
        if isinstance(default, FieldInfo):
            default = default.default
        plain = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
        written = plain if isinstance(plain, str) else inspect.formatannotation(plain)
        kind, meaning = (value.replace("|", "\\|") for value in (written, explained[field.name]))
        rows.append(f"| `{field.name}` | `{default}` | `{kind}` | {meaning} |")
    return rows


def measured(name: str, summary: Summary) -> list[str]:
    rows = [d for d in summary.defenses if name in [part.partition(":")[0] for part in d.spec.split("+")]]
    if not rows:
        return []
    case = summary.case
    lines = [
        f"`{summary.command or 'gradveil audit'}`",
        "",
        f"{case.model} on {case.data}, {case.victims} victims, knowledge {case.knowledge}, seed {case.seed}, "
        f"written {time.strftime('%Y-%m-%d')}.",
        "",
        "| defense | attack | against | PSNR | SSIM | ASR | identified | cosine to the true update |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for defense in rows:
        cosine = "" if defense.cosine is None else f"{defense.cosine:.2f}"
        for attack in defense.attacks:
            rate, psnr, ssim = attack.identified, attack.psnr, attack.ssim
            if not attack.ok or rate is None or psnr is None or ssim is None:
                continue
            sure = f"{rate.rate:.2f} ({rate.low:.2f}–{rate.high:.2f})"
            lines.append(
                f"| `{defense.spec}` | `{attack.spec}` | {attack.against} | {psnr.mean:.1f} | {ssim.mean:.2f} "
                f"| {attack.asr:.2f} | {sure} | {cosine} |"
            )
    verdicts = [f"`{d.spec}` {d.verdict}" for d in rows]
    return [*lines, "", f"Verdict: {', '.join(verdicts)}.", ""]


def effect(defense: Defense, path: Path) -> tuple[bool, float]:
    """Draw the originals above the images fed to the network, if they differ; and the seconds per round of one image."""
    from PIL import Image

    data = data_sets.load("mnist-5k", seed=0)
    module = models.build("lenet", input_shape=data.input_shape, num_classes=10, seed=0)
    function = ModelFunction(defense.model(module, data.input_shape))
    state = function.state()
    setup = Setup(data.task(function), state, data.private[:300], data.public)
    client = prepare_client(defense, LocalTraining(), setup)
    fed, begun = [], time.process_time()
    for i in range(IMAGES):
        _, trace = client.round(state, data.private[i : i + 1], i)
        fed.append(trace.fed.x[0].clamp(0, 1))
    seconds = (time.process_time() - begun) / IMAGES
    original, changed = data.private.x[:IMAGES], torch.stack(fed)
    differs = bool((original - changed).abs().max() > 1e-6)
    if differs:
        sheet = torch.cat([torch.cat(list(rows[:, 0]), dim=1) for rows in (original, changed)])
        picture = Image.fromarray((sheet * 255).round().byte().numpy())
        picture.resize((picture.width * 4, picture.height * 4), Image.Resampling.NEAREST).save(path)
    return differs, seconds


if __name__ == "__main__":
    main()
