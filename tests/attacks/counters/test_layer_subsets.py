"""A layer that was spoilt is found and left out, with no word about the defense."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradveil.attacks import parse
from gradveil.attacks.generic.layer_subsets import _log_share, _subsets
from gradveil.defenses.base import Defense


class Scrambled(Defense):
    """Sends noise in place of the classifier's weights: ten lines of a user."""

    def update(self, tensors: dict, step: object) -> dict:
        spoilt = list(tensors)[-2]
        noise = torch.randn(tensors[spoilt].shape, generator=step.rng)  # type: ignore[attr-defined]
        return {**tensors, spoilt: noise * tensors[spoilt].std()}


def test_a_spoilt_layer_is_left_out(observe_victims: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_victims(victims=2, defense=f"{__name__}:Scrambled", seed=1)
    quick = parse("swift:restarts=0,cycles=0,adam_steps=0")
    assert best_psnr(quick(seen), truth).max() < 20
    quality = best_psnr(parse("layer-subsets")(seen), truth)
    assert quality.min() > 25, quality


def test_what_explains_more_of_the_update_is_more_likely() -> None:
    sent = {"small": torch.tensor([[1.0, 2.0]]), "large": torch.arange(1.0, 101.0)[None]}
    all_but_small = _log_share({**sent, "small": torch.zeros(1, 2)}, sent)
    all_but_large = _log_share({**sent, "large": torch.zeros(1, 100)}, sent)
    nothing = _log_share({n: -t for n, t in sent.items()}, sent)
    assert torch.equal(_log_share({n: 4 * t for n, t in sent.items()}, sent), _log_share(sent, sent))  # whatever the size
    assert float(all_but_small) < float(all_but_large) < float(nothing) == 0
    assert torch.isclose(all_but_large, torch.log(torch.tensor([1e-8])))  # two entries, half of each


def test_subsets_are_everything_what_was_sent_and_all_but_one(observe_victims: Callable) -> None:
    (one,), _ = observe_victims(victims=1, defense="prune:ratio=0.5")
    every, sent, early, *left_out = _subsets(one, 8)
    names = one.model.trainable
    assert all(bool(every[n].all()) for n in names)
    assert all(torch.equal(sent[n] != 0, one.update.tensors[n] != 0) for n in names if sent[n].numel() > 1)
    assert {n for n in names if early[n].any()} == set(names[: len(names) // 2])
    for subset in left_out:
        gone = {n for n in names if not subset[n].any()}
        assert {n.rpartition(".")[0] for n in gone} == {next(iter(gone)).rpartition(".")[0]}
