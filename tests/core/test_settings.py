"""How a method is written down: what is read is what was meant, what is written can be read, the rest is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from gradveil.attacks import parse as parse_attack
from gradveil.core.errors import UserError
from gradveil.core.settings import Registry, settings, spec_of, split_chain
from gradveil.defenses import parse
from gradveil.defenses.base import Chain, Defense
from gradveil.defenses.data.ats.defense import ATS
from gradveil.defenses.update.clip import Clip
from gradveil.defenses.update.noise import Gaussian, Laplace
from gradveil.defenses.update.none import NoDefense
from gradveil.defenses.update.prune import Prune

KINDS: Registry[object] = Registry("kind")


@KINDS.register("every-kind")
@settings
class EveryKind:
    """A field of every kind that methods have."""

    whole: int = Field(default=3, ge=-10_000, le=10_000)
    real: float = 0.5
    unset: float | None = Field(default=None, ge=0)
    switch: bool = True
    choice: Literal["first", "second-one"] = "first"
    places: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()


finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-300, max_value=1e300)
word = st.from_regex(r"[a-z][a-z0-9_.]{0,8}", fullmatch=True)
every_kind = st.builds(
    EveryKind,
    whole=st.integers(-10_000, 10_000),
    real=finite,
    unset=st.none() | positive,
    switch=st.booleans(),
    choice=st.sampled_from(["first", "second-one"]),
    places=st.lists(word, max_size=3).map(tuple),
    numbers=st.lists(st.integers(-99, 99), max_size=3).map(tuple),
)
single = st.one_of(
    st.builds(Prune, ratio=st.floats(0, 1, exclude_max=True), scope=st.sampled_from(["tensor", "global"])),
    st.builds(Gaussian, std=positive),
    st.builds(Laplace, scale=positive),
    st.builds(Clip, norm=positive),
    st.builds(ATS, policy=st.sampled_from(["3-1-7", "5", "1-2+3", "0-49-7+8+9-10"]), flip=st.booleans()),
    st.builds(NoDefense),
)


@given(every_kind)
def test_what_is_written_reads_back_equal(method: EveryKind) -> None:
    assert KINDS.parse(spec_of(method)) == method


@given(st.lists(single, min_size=1, max_size=4))
def test_chains_read_back_part_by_part(parts: list[Defense]) -> None:
    text = "+".join(spec_of(p) for p in parts)
    found = parse(text)
    assert found.parts == tuple(parts)
    assert found.spec == text
    assert parse(found.spec) == found


def test_only_what_differs_from_the_default_is_written() -> None:
    assert spec_of(EveryKind()) == "every-kind"
    assert spec_of(EveryKind(real=0.25, switch=False, places=("a", "b"))) == "every-kind:real=0.25,switch=false,places=a/b"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ats:policy=3-1-7+43-18-18+prune:ratio=0.7", ["ats:policy=3-1-7+43-18-18", "prune:ratio=0.7"]),
        ("gaussian:std=1e+3", ["gaussian:std=1e+3"]),
        ("gaussian:std=1e+3+prune", ["gaussian:std=1e+3", "prune"]),
        ("dcs2 + prune", ["dcs2 + prune"]),  # a plus that no name follows directly belongs to the value
        ("own.mod:Class+prune", ["own.mod:Class", "prune"]),
        ("prune+own.mod:Class:share=0.5", ["prune", "own.mod:Class:share=0.5"]),
    ],
)
def test_a_plus_divides_only_before_a_name(text: str, parts: list[str]) -> None:
    assert split_chain(text) == parts


def test_the_pluses_of_a_policy_and_of_a_number_stay_whole() -> None:
    found = parse("ats:policy=3-1-7+43-18-18+prune:ratio=0.7")
    assert [type(p) for p in found.parts] == [ATS, Prune]
    assert found.parts[0].policies() == ((3, 1, 7), (43, 18, 18))  # type: ignore[attr-defined]
    assert found.parts[1] == Prune(ratio=0.7)
    assert parse("gaussian:std=1e+3") == Gaussian(std=1000.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precoed", "did you mean 'precode'?"),
        ("precoed:k=3", "did you mean 'precode'?"),
        ("zzzzzz", "no defense 'zzzzzz'."),
        ("prune:rato=0.5", "its settings: ratio, scope"),
        ("prune:ratio", "is not a setting"),
        ("prune:ratio=", "is not a setting"),
        ("prune:ratio=x", "valid number"),
        ("prune:ratio=1.5", "less than 1"),
        ("prune:scope=everything", "'tensor' or 'global'"),
        ("prune:ratio=0.5,ratio=0.6", "given twice"),
        ("gaussian:std=nan", "std"),
        ("prune+", "prune+"),
        ("+prune", "empty part"),
        ("dcs2++prune", "dcs2+"),
        ("", "empty part"),
        ("two words", "is not a defense"),
        ("nowhere:Class", "cannot import"),
        ("gradveil.core.errors:Nothing", "has no 'Nothing'"),
        ("gradveil.core.errors:unknown", "is not a class"),
    ],
)
def test_a_wrong_defense_is_told_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError) as told:
        parse(text)
    assert words in str(told.value)
    assert "\n" not in str(told.value)


def test_a_wrong_attack_names_the_nearest() -> None:
    with pytest.raises(UserError, match="no attack 'swfit'; did you mean 'swift'"):
        parse_attack("swfit")
    with pytest.raises(UserError, match="'gradveil.defenses.update.prune:Prune' is not an attack"):
        parse_attack("gradveil.defenses.update.prune:Prune")
    with pytest.raises(UserError, match="'gradveil.attacks.matching.ig:InvertingGradients' is not a defense"):
        parse("gradveil.attacks.matching.ig:InvertingGradients")


OWN = '''
from gradveil import Defense


class Share(Defense):
    """Send a share of the update."""

    share: float = 0.5

    def update(self, tensors, step):
        return {name: self.share * g for name, g in tensors.items()}
'''


@pytest.mark.parametrize("path", ["own_methods", "own_package.methods"])
def test_a_class_of_the_users_own(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path.joinpath(*path.split(".")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    plain, quarter = parse(f"{path}:Share"), parse(f"{path}:Share:share=0.25")
    assert (plain.share, quarter.share) == (0.5, 0.25)  # type: ignore[attr-defined]
    assert plain.spec == f"{path}:Share"
    assert parse(quarter.spec) == quarter
    chain = parse(f"{path}:Share:share=0.25+prune:ratio=0.5")
    assert isinstance(chain, Chain)
    assert chain.parts == (quarter, Prune(ratio=0.5))
    with pytest.raises(UserError, match="its settings: share"):
        parse(f"{path}:Share:size=1")


def test_two_methods_cannot_have_one_name() -> None:
    names: Registry[object] = Registry("thing")
    names.register("one")(type("First", (), {}))
    with pytest.raises(ValueError, match="two things are named 'one'"):
        names.register("one")(type("Second", (), {}))
