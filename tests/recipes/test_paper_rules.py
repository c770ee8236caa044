"""What every recipe keeps to, at both scales, so that its numbers say of the paper's method what they seem to say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from gradveil import attacks, defenses
from gradveil.attacks.base import Workload
from gradveil.attacks.matching.engine import MatchingAttack
from gradveil.attacks.matching.optimizers import Adam
from gradveil.core.gradients import ModelFunction
from gradveil.core.task import Task
from gradveil.defenses.base import Defense
from gradveil.defenses.batch.instahide import InstaHide
from gradveil.defenses.batch.mixup import MixUp
from gradveil.defenses.batch.refiner.defense import Refiner
from gradveil.defenses.data.ats.defense import ATS
from gradveil.defenses.data.loda.defense import Loda
from gradveil.defenses.gradient.dcs2 import DCS2
from gradveil.defenses.update.place import AtOnePlace
from gradveil.models import build
from gradveil.recipes.claims import Value
from gradveil.recipes.measures import ObscuredAccuracy
from gradveil.recipes.plan import _facts
from gradveil.recipes.recipe import ATTACK_METRICS, SCALES, TRAINING_METRICS, Scale, Scaled, TableCell, all_names, load

BOTH = pytest.mark.parametrize("scale", SCALES)
EVERY = pytest.mark.parametrize("name", all_names())


@cache
def scaled(name: str, scale: Scale) -> Scaled:
    return load(name).at(scale)


def of(paper: str) -> list[str]:
    return [name for name in all_names() if name.startswith(f"{paper}/")]


@cache
def lenet_task() -> Task:
    module = build("lenet", input_shape=(1, 28, 28), num_classes=10)
    return Task(ModelFunction(module), (1, 28, 28), 10, torch.zeros(1), torch.ones(1))


def parts(text: str) -> tuple[Defense, ...]:
    return tuple(defenses.parse(text).parts)


def cells(name: str, scale: Scale) -> Iterator[TableCell]:
    return (cell for cell in scaled(name, scale).wanted() if not cell.measure)


# -- accuracies --------------------------------------------------------------------------------------------------------


def claimed(name: str, scale: Scale, figures: tuple[str, ...]) -> list[TableCell]:
    """The cells of such figures that claims of a recipe name."""
    recipe, table = load(name), scaled(name, scale).cells
    positions = {p for claim in recipe.claims for p in claim.positions(recipe.rows, recipe.columns)}
    return [table[p] for p in positions if not table[p].measure and table[p].figure in figures]


@EVERY
@BOTH
def test_an_accuracy_with_few_defended_clients_stands_beside_that_without_them(name: str, scale: Scale) -> None:
    """Leaving the one defended client out may cost nothing; then its accuracy says nothing of the defense."""
    absent = {cell.audit for cell in cells(name, scale) if cell.figure == "acc_absent"}
    for cell in claimed(name, scale, TRAINING_METRICS):
        training = scaled(name, scale).specs[cell.audit].utility
        assert training is None or training.defended == "all" or cell.audit in absent, cell.audit


@EVERY
def test_claimed_accuracies_of_digits_have_all_test_images(name: str) -> None:
    """Of MNIST 10,000; a thousand leave an error of a point."""
    audits = {cell.audit for scale in SCALES for cell in claimed(name, scale, TRAINING_METRICS)}
    data = [str(scaled(name, scale).specs[audit].data) for scale in SCALES for audit in audits]
    data += [m.data for scale in SCALES for m in scaled(name, scale).measures.values() if isinstance(m, ObscuredAccuracy)]
    assert not [text for text in data if text.startswith("mnist-5k")]


# -- attacks -----------------------------------------------------------------------------------------------------------

LOW, HIGH = ("psnr", "ssim", "asr", "identified"), ("mse", "mse_normalised", "lpips", "lpips_vgg")  # where nothing leaks
WITHOUT_CONTROL = {"ats/table3", "loda/figure2"}  # tables that have no undefended cell, as in the paper


@pytest.mark.parametrize("name", [name for name in all_names() if name not in WITHOUT_CONTROL])
def test_a_claim_that_nothing_leaks_is_asked_only_where_the_attack_works_undefended(name: str) -> None:
    """An attack that fails without a defense bears out every defense."""
    recipe, table = load(name), scaled(name, "paper").cells
    for claim in recipe.claims:
        bare = claim.model_copy(update={"only_if": None})
        positions = bare.positions(recipe.rows, recipe.columns)
        if claim.lowest or claim.highest:
            positions = positions[:1]
        of_claim = [table[p] for p in positions if not table[p].measure]
        figures = LOW if claim.at_most or claim.lowest else HIGH if claim.at_least or claim.highest else ()
        if not of_claim or any(cell.figure not in figures or cell.defense == "none" for cell in of_claim):
            continue
        assert claim.only_if is not None, claim.text
        controls = [table[p] for p in claim.only_if.positions(recipe.rows, recipe.columns)]
        assert all(cell.defense == "none" and cell.audit in {c.audit for c in of_claim} for cell in controls), claim.text


# -- baselines ---------------------------------------------------------------------------------------------------------


@EVERY
@BOTH
def test_noise_and_pruning_act_on_every_gradient_of_a_training(name: str, scale: Scale) -> None:
    """As in the papers. On weight differences they are other defenses. With FedSGD one gradient is all that is sent."""
    for cell in cells(name, scale):
        training = scaled(name, scale).specs[cell.audit].utility
        if cell.figure in TRAINING_METRICS and training is not None and not training.fedsgd:
            assert all(part.at == "gradient" for part in parts(cell.defense) if isinstance(part, AtOnePlace)), cell.defense


@pytest.mark.parametrize("name", of("loda"))
@BOTH
def test_mixtures_are_scored_against_their_largest_component_unless_they_are_decoded(name: str, scale: Scale) -> None:
    """LODA [P] 5.1: without the adaptive attack, against the component with the largest weight."""
    for (row, _), cell in scaled(name, scale).cells.items():
        mixed = not cell.measure and any(isinstance(part, MixUp | InstaHide) for part in parts(cell.defense))
        if mixed and cell.figure in ATTACK_METRICS and "original" not in row:
            decoded = cell.attack in ("mixup-decode", "instahide-decode")
            assert cell.against == ("original" if decoded else "component"), (row, cell)


# -- LODA --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", of("loda"))
@BOTH
def test_a_row_is_of_one_specification_of_loda(name: str, scale: Scale) -> None:
    """Privacy and accuracy of one variant at one weight are of the same images: 500 steps of one length."""
    variants: dict[tuple[str, float], set[str]] = {}
    texts = [cell.defense for cell in cells(name, scale)]
    for measure in scaled(name, scale).measures.values():
        assert isinstance(measure, ObscuredAccuracy)
        texts += measure.trained_on.values()
    for text in texts:
        for part in parts(text):
            if isinstance(part, Loda):
                assert (part.steps, part.lr, part.fall) == (500, 0.1, False)
                variants.setdefault((part.variant, part.c), set()).add(part.spec)
    assert variants and all(len(specs) == 1 for specs in variants.values()), variants
    if measures := scaled(name, scale).measures:
        (trained,) = measures.values()
        assert isinstance(trained, ObscuredAccuracy)
        attacked = {cell.defense for cell in cells(name, scale)}
        assert not attacked or attacked == set(trained.trained_on.values())


@pytest.mark.parametrize("name", of("loda"))
@BOTH
def test_loda_is_measured_by_vgg_and_starts_from_public_images_that_are_named(name: str, scale: Scale) -> None:
    recipe, one = load(name), scaled(name, scale)
    assert not [cell for cell in cells(name, scale) if cell.figure == "lpips"]  # the paper's is VGG: lpips_vgg
    texts = " ".join(f"{recipe.comment} {recipe.reduced}".split())
    for data in {str(spec.data) for spec in one.specs.values()} | {measure.data for measure in one.measures.values()}:
        if data.startswith("cifar10"):
            assert "public=cifar100" in data  # extractor and starts, [P] 5.1
        if data.startswith("svhn"):
            assert "SVHN-extra" in texts and "starts are of SVHN, not of CIFAR-100" in texts


def test_lodas_accuracy_is_compared_with_instahides() -> None:
    """Its central claim."""
    for number, variant in ((1, "LODA2"), (2, "LODA2"), (3, "LODA3"), (4, "LODA3")):
        orders = [claim.order for claim in load(f"loda/table{number}").claims]
        assert ("Accuracy | InstaHide k=4", f"Accuracy | {variant}") in orders


# -- DCS² --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", of("dcs2"))
@BOTH
def test_dcs2_is_run_as_its_authors_run_it(name: str, scale: Scale) -> None:
    """The sum of Eq. 10 is divided, the margin is theirs; what is ours says so in its row."""
    for (row, _), cell in scaled(name, scale).cells.items():
        for part in parts(cell.defense):
            if isinstance(part, DCS2):
                assert (part.divide, part.margin, part.match, part.clamp) == (True, 0.5, "joint", False)
                ours = part.length != "free" or part.start == "same-class"
                assert ours == row.endswith("(ours)"), (row, part.spec)


@BOTH
def test_the_training_of_dcs2_is_the_authors_and_the_stress_test_is_labelled(scale: Scale) -> None:
    specs = scaled("dcs2/table1", scale).specs
    training, stress = (specs[name].utility for name in ("mnist trained", "mnist stress"))
    assert training is not None and stress is not None
    stated = (training.model, training.lr, training.schedule, training.rounds, training.images, training.defended)
    assert stated == ("lenet", 0.01, "exponential:gamma=0.99", 200, 200, 1)
    assert stress.model == "cnn"
    labels = [column for (_, column), cell in scaled("dcs2/table1", scale).cells.items() if cell.audit == "mnist stress"]
    assert labels and all(label.startswith("stress test (ReLU net)") for label in labels)


@BOTH
def test_the_length_of_what_dcs2_sends_is_shown(scale: Scale) -> None:
    for name in ("dcs2/table1", "dcs2/table5"):
        assert [cell for cell in cells(name, scale) if cell.figure == "length"]
    notes = " ".join((DCS2.__doc__ or "").split())
    assert "`kept` is ours" in notes and "`same-class` is ours" in notes and "nothing bounds the length" in notes


@EVERY
@BOTH
def test_defenses_that_start_from_public_images_have_them(name: str, scale: Scale) -> None:
    """Without them DCS² starts from noise and LODA has no extractor of its own: another defense under the same name."""
    for cell in cells(name, scale):
        if any(isinstance(part, DCS2 | Loda) for part in parts(cell.defense)):
            spec = scaled(name, scale).specs[cell.audit]
            if cell.figure not in TRAINING_METRICS or spec.utility is not None:
                assert "public=" in str(spec.data) or _facts(str(spec.data), scale).public > 0, spec.data


# -- Refiner -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", ["figure3", "figure4"])
@BOTH
def test_refiner_is_shown_beside_improved_soteria_with_all_nine_settings(figure: str, scale: Scale) -> None:
    texts = {cell.defense for cell in cells(f"refiner/{figure}", scale)}
    tenths = [round(n / 10, 1) for n in range(1, 10)]
    decades = [10.0**n for n in range(-6, 3)]
    expected = {f"refiner:alpha={n}" for n in tenths} | {f"soteria:ratio={n}" for n in tenths}
    expected |= {f"prune:ratio={n},at=gradient" for n in tenths} | {"graddefense", "none"}
    expected |= {f"gaussian:std={n},at=gradient" for n in decades} | {f"laplace:scale={n},at=gradient" for n in decades}
    assert {defenses.parse(text).spec for text in texts} == {defenses.parse(text).spec for text in expected}
    ratios = {cell.defense for cell in cells("refiner/figure6", scale) if cell.figure == "noise_ratio"}
    assert ratios == {f"refiner:alpha={n}" for n in tenths}


def test_both_objectives_of_refiner_are_named_where_its_numbers_stand() -> None:
    notes = " ".join((Refiner.__doc__ or "").split())
    assert "Σ‖w ⊙ (∇L(x*) − g)‖² − β·PM" in notes  # as printed
    assert "UM/UM(0) − β·(1 − UM/UM(0))₊·PM" in notes and "ours and the default" in notes
    for name in ("refiner/figure3", "refiner/figure4"):
        assert "with our objective (`gradveil show refiner` has both)" in " ".join(load(name).comment.split())


# -- ATS ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", of("ats"))
@BOTH
def test_every_row_of_ats_has_the_same_crop_and_flip(name: str, scale: Scale) -> None:
    """The control and other defenses too, at every step; 32 pixels of 36 where a garment has 28. No digits, so flips."""
    for cell in cells(name, scale):
        data = str(scaled(name, scale).specs[cell.audit].data)
        garment = data.startswith("fashion-mnist")
        (ats,) = [part for part in parts(cell.defense) if isinstance(part, ATS)] or [None]
        assert ats is not None and (ats.flip, ats.every_step, ats.crop) == (True, True, 2 if garment else 4), cell.defense
        assert not garment or "pad=2" in data
        assert not data.startswith(("mnist", "svhn"))
        assert scaled(name, scale).specs[cell.audit].held_out  # victims of the validation part


# -- PRECODE -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", of("precode"))
@BOTH
def test_precode_is_trained_and_attacked_by_adam_and_its_noise_drawn_anew(name: str, scale: Scale) -> None:
    for cell in cells(name, scale):
        spec = scaled(name, scale).specs[cell.audit]
        if cell.attack:
            attack = attacks.parse(cell.attack)
            assert isinstance(attack, MatchingAttack) and attack.name == ("cpl" if name == "precode/table4" else "ig")
            match = attack.match(Workload(lenet_task(), "standard"))
            assert isinstance(match.optimizer, Adam) and match.resample
        if (training := spec.utility) is not None:
            assert (training.optimizer, training.lr, training.batch_size) == ("adam", 0.001, 64)
        if spec.trained_epochs:
            assert spec.trained_by == "adam:lr=0.001,batch_size=64"
        assert spec.model in ("smlp", "dmlp", "lenet")
    if name == "precode/figure7":
        assert {spec.model for spec in scaled(name, scale).specs.values()} == {"dmlp", "lenet"}


def test_precodes_pictures_are_judged_by_every_column_that_the_claims_name() -> None:
    """Once a claim held that only PRECODE and noise of 1e-2 hide the images, in a table where that noise hid nothing."""
    recipe = load("precode/figure5")
    published = {"Baseline": 0.99, "NG-2": 0.03, "NG-3": 0.62, "GC": 0.42, "Ours": 0.01}  # [P] Table 2, DMLP

    def verdicts(**changed: float) -> set[str]:
        table = {("DMLP", column): Value(ssim) for column, ssim in {**published, **changed}.items()}
        return {claim.judge(table, recipe.rows, recipe.columns).verdict for claim in recipe.claims}

    assert verdicts() == {"holds"}
    for column, ssim in (("NG-2", 0.8), ("NG-3", 0.1), ("GC", 0.1), ("Ours", 0.5)):
        assert "does not hold" in verdicts(**{column: ssim}), column
    assert verdicts(Baseline=0.3) == {"cannot be told"}


def test_precodes_noise_is_shown_beside_the_gradient_that_it_is_added_to() -> None:
    """On the untrained DMLP noise of 1e-2 is ten times as large as an entry of the gradient."""
    shown = {column for (_, column), cell in scaled("precode/table2", "cpu").cells.items() if cell.figure == "noise_ratio"}
    assert {"DMLP NG-2", "DMLP NG-3", "DMLP noise 1e-1", "LeNet NG-2", "LeNet noise 1e-1"} <= shown
    function = ModelFunction(build("dmlp", input_shape=(3, 32, 32), num_classes=10, seed=100))
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))  # normalised pixels have this size
    sizes = []
    for i in range(len(x)):
        gradient = function.gradient(function.state(), x[i : i + 1], torch.tensor([i]))
        sizes.append(torch.cat([g.flatten() for g in gradient.values()]).square().mean().sqrt())
    assert float(torch.stack(sizes).mean()) == pytest.approx(1e-3, rel=0.15)  # CIFAR-10: 0.9e-3 to 1.0e-3
    assert "root mean square of about 1e-3" in " ".join(load("precode/table2").comment.split())


# -- texts -------------------------------------------------------------------------------------------------------------


@EVERY
def test_what_was_tried_stands_on_the_page_in_a_few_lines(name: str) -> None:
    recipe = load(name)
    assert len(" ".join(recipe.comment.split())) <= 500
