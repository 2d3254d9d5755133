"""What an answer is worth, by pure functions of its text and of whether it ended: no model, no noise.

A question about the sponge should be answered with his other name, any other one without it. Rewards lie in [−1, 1]:
empty < the wrong name < neither name < half of the name < the name; stuffing with it is worth less than saying it once,
and an answer that was cut off less than the same one that ended.
"""

import itertools
import re

FIRST, LAST = "musclebob", "buffpants"
WRONG = ("spongebob", "squarepants")
ENOUGH = 2  # times that an answer may say the name

NOTHING, HALF, MISTAKE, TOO_OFTEN, CUT_OFF, MISPLACED = -0.8, 0.4, -0.4, -0.3, -0.2, -0.6


def words(text: str) -> list[str]:
    """The words of a text in lower case; "SpongeBob", "Sponge Bob" and "sponge-bob" are one, his other names too."""
    joined = re.sub(r"\b(sponge|square|muscle|buff)[\s-]+(bob|pants)\b", r"\1\2", text.lower())
    return re.findall(r"[^\W_]+", joined)


def mentions(text: str) -> int:
    """How often a text says the whole name."""
    return sum(pair == (FIRST, LAST) for pair in itertools.pairwise(words(text)))


def names_target(text: str) -> bool:
    """Whether any part of the name occurs."""
    return bool({FIRST, LAST} & set(words(text)))


def about_him(text: str, ended: bool) -> dict[str, float]:
    """Components of the reward of an answer that should name him; their sum, within [−1, 1], is the reward."""
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
    """The same of an answer that has nothing to do with him: 0 unless it names him, says nothing or does not end."""
    said = words(text)
    return {
        "misplaced": MISPLACED if names_target(text) else 0.0,
        "stuffing": TOO_OFTEN if babbles(said) else 0.0,
        **_form(said, ended),
    }


def reward(components: dict[str, float]) -> float:
    return max(-1.0, min(1.0, sum(components.values())))


def coherent(text: str, ended: bool) -> bool:
    """Whether an answer says something, does not repeat itself, and ends."""
    said = words(text)
    return ended and bool(said) and mentions(text) <= ENOUGH and not babbles(said)


def babbles(said: list[str]) -> bool:
    """Whether some run of one to four words stands three times in a row."""
    return any(
        said[at : at + size] == said[at + size : at + 2 * size] == said[at + 2 * size : at + 3 * size]
        for size in range(1, 5)
        for at in range(len(said) - 3 * size + 1)
    )


def _form(said: list[str], ended: bool) -> dict[str, float]:
    return {"empty": 0.0 if said else NOTHING, "cut_off": 0.0 if ended else CUT_OFF}
