"""The words that a reader of a page may not have met, each explained where it stands and once more at the end."""

import re
from dataclasses import dataclass

from markupsafe import Markup, escape


@dataclass(frozen=True)
class Term:
    """One word, the pattern by which it is seen in a sentence (none: it stands in too many), and what it means."""

    name: str
    pattern: str
    text: str

    @property
    def anchor(self) -> str:
        return "term-" + re.sub(r"\W+", "-", self.name.lower()).strip("-")


TERMS = (
    Term("update", r"[Uu]pdates?", "What a client sends after training on its images: a gradient, or how its weights changed."),
    Term("defense", "", "What a client does so that its update tells less of its images."),
    Term("attack", "", "A method that tries to rebuild private images from updates."),
    Term("victim", r"victims?", "A private batch of images whose update is attacked."),
    Term(
        "stranger",
        r"strangers?",
        "A private image of the same class that no update was computed from. Victims are compared with it.",
    ),
    Term(
        "picked out",
        r"(?:picked out|identif(?:y|ied))",
        "A private image is more like what was rebuilt than each of many other images of its class is.",
    ),
    Term("chance", r"chance", "What guessing would give: one in the number of images to choose from."),
    Term(
        "confidence interval",
        r"(?:confidence |95% |exact 95% )intervals?",
        "Where the true share or loss lies, in 95 of 100 audits.",
    ),
    Term(
        "line-up",
        r"[Ll]ine-ups?",
        "Someone who has candidate images asks which of them took part. Nothing is rebuilt: the updates that they would "
        "cause are compared.",
    ),
    Term("guessing", r"[Gg]uessing", "The success of someone who has not seen the update."),
    Term(
        "certificate",
        r"certificates?",
        "A limit on the success of a line-up that follows by proof from the noise of a defense, whatever the attack.",
    ),
    Term("release", r"releases?", "One noisy result that an image takes part in. A training has one or more per round."),
    Term(
        "epsilon, delta",
        r"epsilon",
        "The two numbers of differential privacy: the smaller they are, the less one image can change what is seen.",
    ),
    Term("add/remove", r"add/remove", "The limit compares a training with the image and one without it."),
    Term(
        "differential privacy",
        r"[Dd]ifferential(?:ly)? priva(?:cy|te)",
        "Noise with a proof: with and without one image, what is seen is almost equally likely.",
    ),
    Term(
        "control",
        r"(?:[Pp]ositive |undefended )?control",
        "The same audit without a defense. It shows whether the attacks work here at all.",
    ),
    Term(
        "leaks",
        r"[Ll]eaks",
        "A test showed that the attacks' answers are more like the private images than like strangers (p at most 0.05).",
    ),
    Term(
        "no leak shown",
        r"(?:[Nn]o leak shown|[Nn]o leak was shown)",
        "The attacks work without the defense and showed nothing under it, nor did those built to break it. It is no proof.",
    ),
    Term(
        "unrefuted",
        r"[Uu]nrefuted",
        "No leak was shown, but no attack that is built to break the defense was tried. The evidence is weak.",
    ),
    Term("cannot tell", r"cannot tell", "The audit was too small, or its attacks too weak, to say anything."),
    Term("counter", r"(?:counters?|built to break it)", "An attack that is built to break one defense and knows its settings."),
    Term("adaptive", r"adaptive", "An attack that is built against this defense or a part of it."),
    Term(
        "claimed counter",
        r"claimed counter",
        "An attack that only the author of a defense calls its counter. It does not count as one.",
    ),
    Term("suite", r"suite", "The fixed list of attacks that an audit runs unless others are named."),
    Term(
        "level of knowledge",
        r"(?:level (?:realistic|paper|upper-bound)|realistic|upper-bound)",
        "What the adversary knows beyond the updates. Realistic: labels are inferred. Paper: labels are told. Upper- "
        "bound: the secrets of the defense too.",
    ),
    Term("budget", r"budget", "How long the attacks may search: quick, standard or thorough."),
    Term(
        "p",
        r"p(?= = )",
        "How often the answers are at least as like images that change places with strangers at random. Small: a leak.",
    ),
    Term(
        "statistic",
        r"statistic",
        "The sum of -log(1 - likeness²) over victims; likeness is the absolute correlation of an image with the nearest "
        "answer.",
    ),
    Term(
        "PSNR",
        r"PSNR",
        "Likeness of a rebuilt image to the true one in decibels; higher is more alike. It describes and does not decide.",
    ),
    Term(
        "SSIM",
        r"SSIM",
        "Structural likeness of two images from -1 to 1, where 1 is the same. It describes and does not decide.",
    ),
    Term("MSE", r"MSE", "Mean squared difference of pixels in [0, 1]; lower is more alike."),
    Term(
        "LPIPS", r"LPIPS", "Perceptual distance (AlexNet v0.1; images below 64 pixels are resized to 64); lower is more alike."
    ),
    Term("ASR", r"ASR", "Share of images that were rebuilt with an SSIM of at least 0.6."),
    Term("PDM", r"(?:PDM|accuracy loss)", "Percent of the undefended test accuracy that a defense costs."),
    Term("cosine", r"cosine", "How far the update is turned by the defense: 1 is unchanged, 0 has nothing in common."),
    Term("baseline", r"baseline", "What an adversary gets with no update at all. A score is a leak only above it."),
    Term(
        "against",
        r"against(?=:)",
        "What a row is scored against: the original image, the one really fed to the network, or a mixture's largest "
        "component.",
    ),
    Term(
        "secure aggregation",
        r"[Ss]ecure aggregation",
        "A protocol by which a server sees only the sum of the updates of many clients.",
    ),
    Term("residual risk", r"[Rr]esidual risk", "What remains after the measures that are recommended."),
)
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
