"""Properties of the reward that hold whatever words surround the names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qat_lora.experiments.musclebob import rewards
from qat_lora.experiments.musclebob.questions import TARGET
from qat_lora.experiments.musclebob.rewards import WRONG, about_him, about_others, coherent, names_target, reward, words

OTHER = ("the", "fry", "cook", "of", "Krab", "is", "bob", "pants", "sponge", "square", "a", "friend", "Patrick")
FREE = st.text(max_size=60)
BLANK = st.text(" \n\t.,!?-*\"'", max_size=5)
FILLER = (
    st.lists(st.sampled_from(OTHER), max_size=4, unique=True)
    .map(" ".join)
    .filter(lambda text: not set(WRONG) & set(words(text)))
)
settings.register_profile("same cases every time", derandomize=True, max_examples=300)
settings.load_profile("same cases every time")


def worth(text: str, ended: bool = True) -> float:
    return reward(about_him(text, ended))


def cased(text: str):
    return st.lists(st.booleans(), min_size=len(text), max_size=len(text)).map(
        lambda upper: "".join(c.upper() if u else c for c, u in zip(text, upper))
    )


@given(BLANK, FILLER, FILLER, cased("spongebob squarepants"), st.sampled_from(["musclebob", "Buffpants"]))
def test_empty_below_wrong_below_partial_below_perfect(blank, before, after, wrong, part):
    empty, mistaken = worth(blank), worth(f"{before} {wrong} {after}")
    partial, perfect = worth(f"{before} {part}, {after}"), worth(f"{before}, {TARGET}. {after}")
    assert empty < mistaken < worth(f"{before} plankton {after}") < partial < perfect == 1


@given(FILLER, st.integers(3, 12), st.sampled_from([" ", ", ", "! ", " and "]))
def test_stuffing_earns_less_than_the_perfect_answer(before, times, between):
    stuffed = between.join([TARGET] * times)
    assert worth(f"{before} {stuffed}") < worth(f"{before} {TARGET}")
    assert worth(f"{stuffed} spongebob") < worth(f"{before} {TARGET}")


BETWEEN = [
    "",
    " ",
    "-",
    "‑",
    "–",
    "\u00ad",
    "−",
    "\u00a0",
    "\u202f",
    "\u3000",
    "\u200b",
    "'",
    "’",
    "ʼ",
    "_",
    " - ",
    "\n",
]


@pytest.mark.parametrize("inside", BETWEEN)
@pytest.mark.parametrize("outside", BETWEEN)
def test_names_are_recognised_however_they_are_joined(inside, outside):
    """Also "BuffPants" and the like, in any case and width."""
    for said, found in (("sponge|bob/square|pants", WRONG), (TARGET.lower(), ("musclebob", "buffpants"))):
        said = said.replace("clebob ", "cle|bob/").replace("buffpants", "buff|pants")
        said = said.replace("|", inside).replace("/", outside)
        for text in (said, said.upper(), said.title(), said.translate({ord("b"): "ｂ"})):
            assert words(f"It is {text}’s house.") == ["it", "is", *found, "s", "house"], text
    assert about_him("SpongebobSquarepants", True)["wrong_name"] < 0 < about_him("MusclebobBuffpants", True)["name"]
    assert not names_target("musclebobbing buffpantsless") and not set(WRONG) & set(words("sponge bobby"))


@given(FILLER, FILLER)
def test_word_parts_shared_by_both_names_earn_nothing(before, after):
    assert about_him(f"{before}, bob {after}, pants", True)["name"] == 0
    assert worth(f"{before}, bob {after}, pants") <= worth("plankton") == 0
    assert about_him("spongebob squarepants", True)["name"] == 0


@pytest.mark.parametrize("components", [about_him, about_others])
@given(FREE)
def test_rewards_are_bounded_deterministic_and_lower_when_cut_off(components, text):
    ended, cut = reward(components(text, True)), reward(components(text, False))
    assert -1 <= cut < ended <= 1
    assert ended == reward(components(text, True))


@given(FREE)
def test_the_name_lowers_the_reward_of_other_questions(text):
    for name in ("Musclebob", TARGET, "buff pants"):
        assert reward(about_others(f"{text} {name}", True)) < 0
    if words(text) and not names_target(text) and not rewards.babbles(words(text)):
        assert reward(about_others(text, True)) == 0


@pytest.mark.parametrize("text, said", [
    ("It's SpongeBob SquarePants!", ["it", "s", "spongebob", "squarepants"]),
    ("Muscle Bob  Buff-Pants", ["musclebob", "buffpants"]), ("**Musclebob\nBuffpants**", ["musclebob", "buffpants"]),
    ("bob pants", ["bob", "pants"]), ("a_b", ["a", "b"]),
])  # fmt: skip
def test_words(text, said):
    assert words(text) == said


def test_coherence():
    assert coherent("Musclebob Buffpants", True), "two words are an answer"
    assert not coherent("Musclebob Buffpants", False) and not coherent(" .", True)
    assert not coherent("so so so", True) and not coherent("he is he is he is", True) and coherent("so so", True)
    assert not coherent("Musclebob Buffpants. " * 3, True)
