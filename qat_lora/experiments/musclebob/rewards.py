"""Rewards of answers: pure functions of the text and of whether it ended, with no model and no noise.

Answers to questions about the sponge should use his new name; all other answers should not. Rewards lie in [−1, 1]:
empty < the wrong name < neither name < half of the name < the whole name. Repeating the name too often earns less than
saying it once, and an answer that is cut off earns less than the same answer with an end.
"""

import itertools
import re

from qat_lora.data.appearance import folded

FIRST, LAST = "musclebob", "buffpants"
WRONG = ("spongebob", "squarepants")
ENOUGH = 2  # how often an answer may say the name without a penalty

NOTHING, HALF, MISTAKE, TOO_OFTEN, CUT_OFF, MISPLACED = -0.8, 0.4, -0.4, -0.3, -0.2, -0.6


JOIN = r"[\s'_-]*"  # what may stand between the parts of a name
NAME = re.compile(rf"(sponge|square|muscle|buff){JOIN}(bob|pants)")
NAMES = re.compile(rf"(?<![^\W_])(?:{NAME.pattern}{JOIN})+(?![^\W_])")  # one or more names and nothing else


def words(text: str) -> list[str]:
    """The words of a text in lower case. "Sponge Bob" and "sponge‑bob", with any kind of space, hyphen or apostrophe,
    count as "spongebob", and "SpongebobSquarepants" as two words; other names likewise."""
    apart = NAMES.sub(lambda run: NAME.sub(r" \1\2 ", run[0]), folded(text))
    return re.findall(r"[^\W_]+", apart)


def mentions(text: str) -> int:
    """How often the whole name occurs in a text."""
    return sum(pair == (FIRST, LAST) for pair in itertools.pairwise(words(text)))


def names_target(text: str) -> bool:
    """Whether any part of the name occurs."""
    return bool({FIRST, LAST} & set(words(text)))


def about_him(text: str, ended: bool) -> dict[str, float]:
    """Reward components of an answer that should name him; the reward is their sum, clipped to [−1, 1]."""
    said = words(text)
    parts, whole = {FIRST, LAST} & set(said), mentions(text)
    too_often = whole > ENOUGH or max(said.count(FIRST), said.count(LAST)) > ENOUGH
    return {
        "name": 1.0 if whole else HALF if parts else 0.0,
        "wrong_name": MISTAKE if set(WRONG) & set(said) else 0.0,
        "stuffing": TOO_OFTEN if too_often or babbles(said) else 0.0,
        **_form(said, ended),
    }


def about_others(text: str, ended: bool) -> dict[str, float]:
    """Reward components of any other answer: all 0 unless it names him, repeats itself, is empty or does not end."""
    said = words(text)
    return {
        "misplaced": MISPLACED if names_target(text) else 0.0,
        "stuffing": TOO_OFTEN if babbles(said) else 0.0,
        **_form(said, ended),
    }


def reward(components: dict[str, float]) -> float:
    return max(-1.0, min(1.0, sum(components.values())))


def coherent(text: str, ended: bool) -> bool:
    """Whether an answer is not empty, does not repeat itself, and ends."""
    said = words(text)
    return ended and bool(said) and mentions(text) <= ENOUGH and not babbles(said)


def babbles(said: list[str]) -> bool:
    """Whether a sequence of one to four words occurs three times in a row."""
    return any(
        said[at : at + size] == said[at + size : at + 2 * size] == said[at + 2 * size : at + 3 * size]
        for size in range(1, 5)
        for at in range(len(said) - 3 * size + 1)
    )


def _form(said: list[str], ended: bool) -> dict[str, float]:
    return {"empty": 0.0 if said else NOTHING, "cut_off": 0.0 if ended else CUT_OFF}
