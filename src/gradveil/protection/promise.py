"""What a defense promises: its mechanism, if it has a proof, and the certificate of its releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradveil.certification import certificate
from gradveil.certification.certificate import Certificate
from gradveil.certification.mechanism import MECHANISMS, Mechanism, NoProof, Releases, named_mechanism
from gradveil.core.errors import UserError
from gradveil.core.settings import build
from gradveil.core.text import listing
from gradveil.defenses import Defense, parse
from gradveil.defenses.gradient.dpsgd import DpSgd
from gradveil.defenses.update.clip import Clip
from gradveil.defenses.update.flower_local import FlowerLocal
from gradveil.defenses.update.noise import Gaussian, Laplace
from gradveil.defenses.update.none import NoDefense
from gradveil.defenses.update.percentile import Percentile
from gradveil.defenses.update.prune import Prune
from gradveil.defenses.update.quantize import Quantize
from gradveil.defenses.update.svt import Svt

# They compute from the noised update alone, so they take nothing from a promise.
AFTERWARDS = (Clip, FlowerLocal, Gaussian, Laplace, NoDefense, Percentile, Prune, Quantize, Svt)
WITHOUT_PROOF: dict[type[Defense], str] = {
    Percentile: "it draws nothing: equal images send equal updates, and entries below gamma leave as they are.",
    Svt: "the proof of the sparse vector technique (Lyu, Su and Li 2017) ends the comparisons when as many entries have passed "
    "as its budget counts; NVFlare compares all entries, again and again, and draws among those that passed. No proof of "
    "that is known to us, and NVFlare's own count grows by noise_var with every entry that is sent.",
}


def certify(
    mechanism: str | Defense | Mechanism,
    *,
    line_up: int = certificate.LINE_UP,
    delta: float = certificate.DELTA,
    risk: float | None = None,
    **releases: object,
) -> Certificate:
    """What the noise of a mechanism promises against everyone who sees all its releases.

    `mechanism` is a defense with a proof (`dpsgd:noise=2.4`, `clip:norm=1+gaussian:std=0.5`), the noise of another tool
    (`opacus:noise_multiplier=1.1`, `flower-central:…`), or a `Mechanism`. `releases` are the fields of
    `Releases`: rounds, local_epochs, sampling, batch_size and images or sample_rate, images_per_person. With `risk`, the
    certificate is that of the noise at which a line-up of `line_up` candidates succeeds at most that often.
    """
    counted = build(Releases, releases, of="certify")
    proven = mechanism if isinstance(mechanism, Mechanism) else mechanism_of(mechanism)
    if isinstance(proven, NoProof):
        raise UserError(f"{proven.name} promises nothing: {proven.reason}")
    if risk is not None:
        proven = replace(proven, noise=certificate.noise_for(risk, proven, counted, line_up))
    return certificate.certify(proven, counted, line_up, delta)


def mechanism_of(source: str | Defense) -> Mechanism | NoProof:
    """The proven mechanism of a defense or of another tool."""
    if isinstance(source, str) and (named := named_mechanism(source)) is not None:
        return named
    method = parse(source)
    parts = method.parts
    private = [part for part in parts if type(part) is DpSgd]
    if len(private) == 1:
        others = [part for part in parts if type(part) not in (DpSgd, *AFTERWARDS)]
        if others:
            return NoProof(method.spec, f"the proof of dpsgd does not cover {others[0].name}, which uses the images too.")
        dpsgd = private[0]
        assert isinstance(dpsgd, DpSgd)
        return Mechanism(method.spec, dpsgd.multiplier)
    return _clipped_and_noised(method.spec, parts)


def _clipped_and_noised(spec: str, parts: Sequence[Defense]) -> Mechanism | NoProof:
    """A clip of the whole update with noise right after it. What comes before ends within the bound."""
    for i, part in enumerate(parts):
        before = parts[i - 1] if i else None
        if type(part) is FlowerLocal:
            noise, bound = part.std, part.clipping_norm
        elif type(part) is Gaussian and type(before) is Clip and before.relative is None and part.relative is None:
            noise, bound = part.std, before.norm
        else:
            continue
        later = [part for part in parts[i + 1 :] if type(part) not in AFTERWARDS]
        if later:
            return NoProof(spec, f"{later[0].name} comes after the noise, and may use the images again.")
        return Mechanism(spec, noise / bound, "update")
    names = {part.name for part in parts}
    if any(getattr(part, "relative", None) is not None for part in parts):
        return NoProof(spec, "a size relative to the update depends on private data, so nothing is bounded.")
    if "gaussian" in names:
        return NoProof(spec, "nothing bounds what one image adds before the noise; write clip:norm=…+gaussian:std=….")
    if "clip" in names:
        return NoProof(spec, "a bound without noise; add +gaussian:std=… after the clip.")
    for part in parts:
        if (reason := WITHOUT_PROOF.get(type(part))) is not None:
            return NoProof(spec, reason)
    others = listing(MECHANISMS)
    return NoProof(spec, f"it has no proof, unlike dpsgd, clip:norm=…+gaussian:std=…, flower-local, and {others}.")
