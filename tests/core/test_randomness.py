"""Streams: what an audit draws can be repeated, what protection draws can be neither repeated nor predicted."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats

from gradveil.core.randomness import SecretStream, Stream, Streams, TorchStream, generator, torch_stream

WORDS = 624  # of the Mersenne Twister
BEGIN = 24  # where its words lie in the state of a torch.Generator


def untempered(outputs: np.ndarray) -> np.ndarray:
    """The words of the Mersenne Twister's state from its outputs: every step of its output function can be undone."""
    y = outputs.astype(np.uint64)
    y ^= y >> np.uint64(18)
    y ^= (y << np.uint64(15)) & np.uint64(0xEFC60000)
    undone = y.copy()
    for _ in range(5):
        undone = y ^ ((undone << np.uint64(7)) & np.uint64(0x9D2C5680))
    y, undone = undone, undone.copy()
    for _ in range(3):
        undone = y ^ (undone >> np.uint64(11))
    return undone & np.uint64(0xFFFFFFFF)


def predictor(words: np.ndarray) -> TorchStream:
    """A stream that continues after these 64-bit outputs (the last 312 of them are 624 outputs of 32 bits)."""
    last = words[-WORDS // 2 :].astype(np.uint64)
    halves = np.stack([last >> np.uint64(32), last & np.uint64(0xFFFFFFFF)], axis=1).reshape(-1)
    stream = TorchStream()
    state = stream.get_state()
    state[BEGIN : BEGIN + 8 * WORDS].view(torch.int64).copy_(torch.from_numpy(untempered(halves).astype(np.int64)))
    counters = state[:BEGIN].view(torch.int32)  # seed (two numbers), outputs left, whether it was seeded, next
    counters[2], counters[3] = 1, 1
    stream.set_state(state)
    return stream


def outputs(stream: Stream, times: int) -> np.ndarray:
    """624 · `times` outputs of 32 bits in pairs, every bit of them."""
    if isinstance(stream, SecretStream):
        return stream._words(WORDS // 2 * times)
    assert isinstance(stream, TorchStream)
    numbers = torch.randint(-(2**63), 2**63 - 1, (WORDS // 2 * times,), generator=stream).numpy()
    return numbers.view(np.uint64) ^ np.uint64(1 << 63)


def noise_left(stream: Stream, times: int) -> float:
    """The size of later noise after the prediction is taken off it; without a prediction 1, with an independent one 1.41."""
    guess = predictor(outputs(stream, times))
    truth, predicted = stream.added_normal(torch.zeros(5000), 1.0), guess.added_normal(torch.zeros(5000), 1.0)
    return float((truth - predicted).norm() / truth.norm())


@pytest.mark.parametrize("times", [1, 2, 5])
def test_624_outputs_reveal_all_later_noise_of_torch_and_none_of_ours(times: int) -> None:
    assert noise_left(generator(7, "noise"), times) == 0
    assert noise_left(torch_stream(8), times) == 0
    assert noise_left(Streams()("noise"), times) > 1.3
    assert noise_left(Streams(b"a secret", fresh=False)("noise"), times) > 1.3


def test_noise_where_the_gradient_is_zero_tells_nothing_of_the_noise_elsewhere() -> None:
    """What a server sees of dead rows, in order, and the noise that follows: no correlation at any distance."""
    drawn = Streams()("noise").added_normal(torch.zeros(40_000), 1.0).double()
    spectrum = torch.fft.rfft(drawn, n=2 * len(drawn))
    correlation = torch.fft.irfft(spectrum.abs() ** 2)[1:30_000] / len(drawn)
    assert float(correlation.abs().max()) < 6 / len(drawn) ** 0.5


def test_streams_of_public_knowledge_do_not_remove_the_noise() -> None:
    """Seeds, rounds, message ids and the state received, through every way in which a stream is made here."""
    state = torch.arange(9.0).numpy().tobytes()
    truth = Streams(hashlib.sha256(b"the client's secret" + b"message-1" + state).digest())("update")
    noise = truth.added_normal(torch.zeros(2000), 1.0)
    public = [str(seed).encode() for seed in range(200)]
    public += [b"", bytes(32), b"message-1", state, b"message-1" + state, hashlib.sha256(b"message-1" + state).digest()]
    guesses: list[Stream] = [torch_stream(seed) for seed in range(200)]
    guesses += [generator(seed, "round", number) for seed in range(20) for number in range(5)]
    guesses += [Streams.of_seed(seed)(*key) for seed in range(200) for key in (("update",), ("round", 1))]
    guesses += [Streams(secret, fresh=False)("update") for secret in public]
    guesses += [SecretStream(secret) for secret in public]
    left = [float((noise - g.added_normal(torch.zeros(2000), 1.0)).norm() / noise.norm()) for g in guesses]
    assert len(left) > 1000
    assert min(left) > 1.3  # the noise of others only adds to it: 1.41


def test_equal_keys_give_equal_streams_only_where_nothing_fresh_is_added() -> None:
    secret = b"a secret"
    one, two = (Streams(secret, fresh=False)("round", 1).normal((5000,)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, Streams(secret, fresh=False)("round", 2).normal((5000,)))
    assert not torch.equal(one, Streams(secret)("round", 1).normal((5000,)))
    assert not torch.equal(*(Streams(secret)("round", 1).normal((5000,)) for _ in range(2)))
    assert "secret" not in repr(Streams(secret))
    # Parts of a key are kept apart.
    assert not torch.equal(*(Streams(secret, fresh=False)(*key).normal((9,)) for key in (("a", "bc"), ("ab", "c"))))


def test_a_stream_forgets_what_it_has_drawn() -> None:
    """Whoever reads the memory of a client later cannot compute the noise of before."""
    stream = SecretStream(b"key")
    before, drawn = stream._key, stream.normal((8,))
    assert stream._key != before
    assert before not in vars(stream).values()
    assert not torch.equal(drawn, stream.normal((8,)))


@pytest.mark.parametrize("stream", [SecretStream(b"law"), generator(0, "law")], ids=["secret", "torch"])
def test_draws_follow_their_laws(stream: Stream) -> None:
    many = 200_000
    zeros = torch.zeros(many)
    for drawn, law in (
        (stream.normal((many,)), stats.norm()),
        (stream.added_normal(zeros, 3.0) / 3, stats.norm()),
        (stream.added_laplace(zeros, 0.5) / 0.5, stats.laplace()),
        (stream.uniform((many,)), stats.uniform()),
        (stream.uniform((many,), torch.float64), stats.uniform()),
    ):
        assert stats.kstest(drawn.double().numpy(), law.cdf).pvalue > 1e-4
    uniform = stream.uniform((50, 40_000))
    assert (uniform >= 0).all() and (uniform < 1).all()
    counts = torch.bincount(stream.integers(0, 7, (many,)), minlength=7)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    assert stream.integers(-3, -1, (4, 5), torch.int8).unique().tolist() == [-3, -2]
    firsts = torch.stack([stream.permutation(5) for _ in range(5000)])
    assert (firsts.sort(dim=1).values == torch.arange(5)).all()
    assert stats.chisquare(torch.bincount(firsts[:, 0], minlength=5).numpy()).pvalue > 1e-4
    assert stream.normal((0, 3)).shape == (0, 3) and stream.normal(()).shape == ()


def test_large_draws_are_whole() -> None:
    """A tensor that takes several blocks: every value is drawn, and none twice."""
    drawn = SecretStream(b"large").added_normal(torch.zeros(3, 300_001, dtype=torch.float64), 1.0)
    assert float(drawn.std()) == pytest.approx(1, abs=0.01)
    assert int((drawn == 0).sum()) < 9
    assert not torch.equal(drawn.flatten()[: 1 << 18], drawn.flatten()[1 << 18 : 2 << 18])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("law", ["added_normal", "added_laplace"])
def test_the_last_bits_of_a_sum_do_not_tell_the_value(law: str, dtype: torch.dtype) -> None:
    """Mironov 2012: with noise of torch added in floating point, a sum shows whether the value was zero."""

    def possible_for_zero(stream: Stream, value: float, std: float = 1.0) -> float:
        """The share of sums that could be noise on a zero, by the bits that noise can have."""
        sums = getattr(stream, law)(torch.full((20_000,), value, dtype=dtype), std).double()
        if isinstance(stream, SecretStream):
            return float((sums * 2.0**24 == (sums * 2.0**24).round()).double().mean())
        return float((sums == sums.float()).double().mean())

    for value in (0.0, 1 / 3, 1e-9, 5.0):
        assert possible_for_zero(SecretStream(b"bits"), value) == 1
    if dtype == torch.float64 and law == "added_normal":
        assert possible_for_zero(torch_stream(0), 0.0) == 1
        assert possible_for_zero(torch_stream(0), 1 / 3) < 0.01


def test_the_grid_is_far_below_the_noise_and_follows_its_scale() -> None:
    for std in (1e-6, 0.013, 1.0, 700.0):
        sums = SecretStream(b"grid").added_normal(torch.full((50_000,), 0.3, dtype=torch.float64), std)
        assert float(sums.std()) == pytest.approx(std, rel=0.02)
        assert len(sums.unique()) > 49_000
    values = torch.rand(5)
    assert torch.equal(SecretStream(b"none").added_normal(values, 0.0), values)
    with pytest.raises(ValueError, match="too small"):
        SecretStream(b"tiny").added_normal(values, 1e-320)


def test_impossible_draws_are_refused() -> None:
    for low, high in ((3, 3), (5, 2), (0, 2**63)):
        with pytest.raises(ValueError, match="no whole numbers"):
            SecretStream(b"").integers(low, high, (2,))
