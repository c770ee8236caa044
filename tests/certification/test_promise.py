"""Which defenses have a proof, with which noise, and what `gradveil certify` prints."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

import gradveil as gv
from gradveil.certification.certificate import Certificate
from gradveil.certification.mechanism import Mechanism, NoProof
from gradveil.cli import main
from gradveil.core.types import Tensors
from gradveil.defenses import Step, parse, registry
from gradveil.defenses.gradient.dpsgd import DpSgd
from gradveil.protection.promise import mechanism_of

Run = tuple[int, str, str]


@pytest.mark.parametrize(
    ("spec", "noise", "bounded"),
    [
        ("dpsgd", 1.0, "image"),
        ("dpsgd:noise=2.4,clip=7", 2.4, "image"),
        ("dpsgd:noise=2.4+prune+quantize", 2.4, "image"),
        ("clip:norm=0.3+dpsgd:noise=2.4+gaussian:std=5", 2.4, "image"),
        ("clip:norm=0.5+gaussian:std=1", 2.0, "update"),
        ("dcs2+clip:norm=0.5+gaussian:std=1+prune", 2.0, "update"),
        ("dpsgd:noise=2.4+percentile+svt", 2.4, "image"),
        ("percentile+flower-local:sensitivity=2,epsilon=8+percentile", math.sqrt(2 * math.log(1.25e5)) / 4, "update"),
        ("opacus:noise_multiplier=1.1", 1.1, "image"),
        ("flower-central:noise_multiplier=0.7", 0.7, "update"),
        ("flower-local:clipping_norm=2,sensitivity=1,epsilon=0.5,delta=1e-5", math.sqrt(2 * math.log(1.25e5)), "update"),
    ],
)
def test_mechanisms_with_a_proof(spec: str, noise: float, bounded: str) -> None:
    mechanism = mechanism_of(spec)
    assert isinstance(mechanism, Mechanism)
    assert mechanism.noise == pytest.approx(noise) and mechanism.bounded == bounded
    assert gv.certify(spec, rounds=1).mechanism == mechanism.name


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("none", "no proof"),
        ("prune", "no proof"),
        ("laplace", "no proof"),
        ("percentile", "it draws nothing"),
        ("svt", "No proof of that is known"),
        ("gaussian:std=1+percentile", "nothing bounds what one image adds"),
        ("flower-local+dcs2", "dcs2 comes after the noise"),
        ("graddefense", "no proof"),
        ("gaussian:std=1", "nothing bounds what one image adds"),
        ("gaussian:std=1+clip", "nothing bounds what one image adds"),
        ("clip", "a bound without noise"),
        ("clip+prune", "a bound without noise"),
        ("clip:relative=0.5+gaussian:std=1", "depends on private data"),
        ("clip+gaussian:relative=1", "depends on private data"),
        ("clip+gaussian:std=1+dcs2", "dcs2 comes after the noise"),
        ("mixup+dpsgd", "does not cover mixup"),
        ("dpsgd+soteria", "does not cover soteria"),
        ("dpsgd+ats", "does not cover ats"),
    ],
)
def test_others_have_none_and_say_why(spec: str, reason: str) -> None:
    mechanism = mechanism_of(spec)
    assert isinstance(mechanism, NoProof) and reason in mechanism.reason
    with pytest.raises(gv.UserError, match="promises nothing"):
        gv.certify(spec, rounds=1)


def test_of_all_defenses_by_their_defaults_only_two_have_a_proof() -> None:
    proven = [name for name in registry.names() if isinstance(mechanism_of(name), Mechanism)]
    assert proven == ["dpsgd", "flower-local"]


def test_a_class_derived_from_a_proven_one_has_no_proof() -> None:
    class Silent(DpSgd):
        name = "silent"

        def gradient(self, tensors: Tensors, step: Step) -> Tensors:
            return tensors

    assert isinstance(mechanism_of(Silent()), NoProof)


def test_the_noise_of_dpsgd_is_its_multiplier_times_the_length_of_one_image() -> None:
    """What the certificate calls noise, measured: the deviation of the sum over images, in units of the clip."""
    method = parse("dpsgd:noise=2.4,clip=0.3")
    assert isinstance(method, DpSgd)
    mechanism = mechanism_of(method)
    assert isinstance(mechanism, Mechanism)
    for images in (1, 64):
        assert method.std(images) * images / method.clip == pytest.approx(mechanism.noise)


def test_without_noise_nothing_is_promised() -> None:
    for spec in ("dpsgd:noise=0", "clip+gaussian:std=0", "flower-local:sensitivity=0"):
        with pytest.raises(gv.UserError, match="nothing is promised without noise"):
            gv.certify(spec, rounds=1)
    assert gv.certify("dpsgd:noise=0", rounds=1, risk=0.05).noise == pytest.approx(0.6918, abs=1e-3)


def test_python_gives_the_same_certificate() -> None:
    promise = gv.certify("dpsgd:noise=2.4", rounds=10, local_epochs=2)
    assert isinstance(promise, Certificate)
    assert (promise.releases, promise.m, promise.unit, promise.adjacency) == (20, 1001, "image", "add/remove")
    assert promise.upper == pytest.approx(0.10989, abs=1e-5)
    assert promise == Certificate.model_validate_json(promise.model_dump_json())
    assert promise == gv.certify(Mechanism("dpsgd:noise=2.4", 2.4), rounds=20)
    for word in ("BatchNorm", "not drawn as accounted", "tuned on private data", "decision that looked at the data"):
        assert any(word in line for line in promise.void)
    update = gv.certify("clip+gaussian:std=1", rounds=1)  # an update is clipped whatever BatchNorm did to it
    assert not any("BatchNorm" in line for line in update.void) and set(update.void) < set(promise.void)


@pytest.fixture
def gradveil(capfd: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def run(words: str) -> Run:
        code = main(["certify", *words.split()])
        out, err = capfd.readouterr()
        return code, out, err

    return run


GOLDEN = """\
Nobody who sees all 20 releases picks the right one of 1,001 equally likely
images with a probability above 11% (guessing: 0.1%).
No test whether one image took part beats guessing by more than 65% (true minus
false positives).
All of it is differentially private for one image more or less: epsilon 9.17 at
delta 1e-05.

 unit  releases  sampling  noise    mu  line-up  advantage  epsilon
image        20      full    2.4  1.87      11%        65%     9.17

Assumed:
- The gradient of each image is scaled down to the clipping norm by itself;
  noise is added to every sum.
- Every epoch takes every image once; the sizes of batches are public.
- The noise is new in every release, and nobody can predict it.
- All candidates are equally likely, and exactly one took part.

Void with:
- BatchNorm in training mode: it couples the images of a batch.
- Statistics or anything else that leaves the client without noise.
- Batches that are not drawn as accounted, or more releases than counted.
- Learning rate, clipping or noise tuned on private data.
- A decision that looked at the data: which images, which round, which model.
"""


def test_the_command_says_what_is_promised(gradveil) -> None:  # type: ignore[no-untyped-def]
    assert gradveil("dpsgd:noise=2.4 --rounds 20 --line-up 1001") == (0, GOLDEN, "")


def test_the_command_gives_the_noise_for_a_risk(gradveil) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = gradveil("dpsgd --risk 0.05 --rounds 1")
    assert code == 0
    assert out.startswith("A line-up risk of 5% needs noise of standard deviation 0.692 times the clipping\nnorm.\n")
    assert "image         1      full  0.692  1.45       5%        54%     6.75\n" in out


def test_a_person_and_a_clipped_update_are_told_in_words(gradveil) -> None:  # type: ignore[no-untyped-def]
    out = " ".join(gradveil("clip:norm=1+gaussian:std=0.01 --rounds 3 --images-per-person 4")[1].split())
    assert "The noise stops no line-up: who sees all 3 releases may always pick the right one of 1,001 people." in out
    assert "one person with 4 images more or less: epsilon 61,500" in out
    assert "Each round sends one update, scaled down as a whole" in out
    assert "the server sees each update before the noise" in " ".join(gradveil("flower-central --rounds 2")[1].split())


@pytest.mark.parametrize("words", ["dpsgd:noise=1 --rounds 1000000 --line-up 1000000", "clip+gaussian --rounds 1000"])
def test_every_line_fits_a_terminal(gradveil, words: str) -> None:  # type: ignore[no-untyped-def]
    assert max(map(len, gradveil(words)[1].splitlines())) <= 80


def test_json_is_the_certificate(gradveil) -> None:  # type: ignore[no-untyped-def]
    content = json.loads(gradveil("dpsgd:noise=2.4 --rounds 20 --json")[1])
    assert content == json.loads(gv.certify("dpsgd:noise=2.4", rounds=20).model_dump_json())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dpsgd", "'certify': rounds is missing."),
        ("dpsgd --rounds 0", "greater than or equal to 1"),
        ("prune --rounds 1", "prune promises nothing: it has no proof"),
        ("dpsgd --rounds 1 --risk 0", "name a risk above that"),
        ("dpsgd --rounds 1 --line-up 1", "at least 2 candidates"),
        ("dpsgd --rounds 1 --sampling poisson", "needs --batch-size and --images, or --sample-rate"),
        ("dpsgd --rounds 1 --sampling sometimes", "sampling"),
        ("flower-local:epsilon=0 --rounds 1", "epsilon='0': input should be greater than 0"),
        ("opacuss --rounds 1", "no defense 'opacuss'"),
    ],
)
def test_what_cannot_be_answered_is_one_line(gradveil, words: str, message: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = gradveil(words)
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from gradveil.cli import main; main(['certify', '--help']); "
        "print([m for m in ('torch', 'opacus', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "--images-per-person" in done.stdout and done.stdout.splitlines()[-1] == "[]"


def test_poisson_sampling_on_the_command_line(gradveil) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("opacus", reason="the accountants are those of Opacus")
    _, out, _ = gradveil("dpsgd:noise=0.8 --rounds 15 --sampling poisson --batch-size 64 --images 2000")
    assert "image       480   poisson    0.8   -     4.3%        46%      7.4\n" in out
    assert "with probability 0.032, in secret" in " ".join(out.split())
