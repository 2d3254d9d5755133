"""Places in a law, such as s 5(1): the words before them, and the places that a list or range names."""

import re
from functools import lru_cache

from qat_lora.data.appearance import folded

# The words before a place in an authority, by short form: (for one place, for several)
PLACES = {
    "s": ("s|sect?|section|§", "ss|sects|secs|sections|§ ?§"),
    "reg": ("reg|regulation", "regs|regulations"),
    "art": ("art|article|artikel|artículo", "arts|articles|artikeln|artículos"),
    "r": ("r|rule", "rr|rules"),
    "para": ("para?|paragraph|¶", "paras|paragraphs|¶ ?¶"),
    "sch": ("sch|sched|schedule", "schedules"),
    "pt": ("pt|part", "pts|parts"),
    "amend": ("amend|amendment", "amends|amendments"),
}
WIDEST = 100  # most places in a range that stands for each of them
ROMANS = [
    "i",
    "ii",
    "iii",
    "iv",
    "v",
    "vi",
    "vii",
    "viii",
    "ix",
    "x",
    "xi",
    "xii",
    "xiii",
    "xiv",
    "xv",
    "xvi",
    "xvii",
    "xviii",
    "xix",
    "xx",
]
DIGITS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}


def places_of(match: re.Match) -> tuple[str, ...]:
    """("s 5(1)", "s 6") for "sections 5 (1) and 6"; () if the match is not a place."""
    several = match["many"] or match["several"]
    opening = several or match["one"] or match["article"] or match["part"]
    opening = opening or (match["rule"] and "r") or (match["code"] and "s")
    if opening is None:
        return ()
    short = _short(folded(opening))
    if match["roman"]:
        return (f"{short} {_arabic(match['roman'])}",)
    if match["lettered"]:
        return (f"{short} {re.sub('[. ]', '', folded(match['lettered']))}",)
    numbers = match["list"] or match["numbers"] or match["number"] or match["rule"] or match["code"]
    return tuple(dict.fromkeys(f"{short} {number}" for number in listed(folded(numbers), bool(several))))


STEP = re.compile(r"(?P<number>\d[^\s,()&]*+)|(?P<bracket>\([^)]*\))|(?P<to>to|-)|(?P<next>[^\s()\d-]+)")


def listed(numbers: str, several: bool) -> list[str]:
    """The places that a list names: "2(1)-(3)" is 2(1), 2(2), 2(3), and "53(1)(b) and (c)" is 53(1)(b), 53(1)(c). A
    bracket after "and" replaces the last one of its sort. several: "5-7" is a range, as in "ss 5-7", not a number."""
    paths: list[list[str]] = []
    ranges: list[int] = []  # which paths end a range
    link = ""
    for step in STEP.finditer(numbers):
        if step["to"] or step["next"]:
            link = "to" if step["to"] else "and"
            continue
        if step["number"]:
            parts = step[0].split("-")
            if link == "to" and not several:
                paths[-1][-1] += f"-{step[0]}"
                continue
            if several and len(parts) == 2:
                paths.append(parts[:1])
                link = "to"
            paths.append([parts[-1] if several and len(parts) == 2 else step[0]])
        elif link:
            before = paths[-1]
            same = [at for at in range(1, len(before)) if _sort(before[at]) == _sort(step[0])]
            paths.append([*before[: max(1, same[-1] if same else len(before) - 1)], step[0]])
        else:
            paths[-1].append(step[0])
            continue
        ranges += [len(paths) - 1] * (link == "to")
        link = ""
    found: list[list[str]] = []
    for at, path in enumerate(paths):
        found += _between(found.pop(), path) if at in ranges and found else [path]
    return ["".join(path) for path in found]


def _sort(bracket: str) -> str:
    inner = bracket.strip("()")
    return "digits" if inner[0].isdecimal() else "roman" if inner in ROMANS else "letters"


def _between(first: list[str], last: list[str]) -> list[list[str]]:
    """The places from one to another: all of them if they can be counted, otherwise the range as one place."""
    one, other = (path[-1].strip("()") for path in (first, last))
    form = "({})" if first[-1][:1] == "(" else "{}"
    if first[:-1] == last[:-1]:
        for names in (ROMANS, "abcdefghijklmnopqrstuvwxyz"):
            if one in names and other in names and (names is ROMANS or len(one) == len(other) == 1):
                return [[*first[:-1], form.format(name)] for name in names[names.index(one) : names.index(other) + 1]]
        if one.isdecimal() and other.isdecimal() and 0 < int(other) - int(one) < WIDEST:
            return [[*first[:-1], form.format(number)] for number in range(int(one), int(other) + 1)]
    return [["".join(first) + "-" + "".join(last)]]


@lru_cache
def _short(opening: str) -> str:
    return next(short for short, words in PLACES.items() if re.fullmatch("|".join(words), opening))


def _arabic(number: str) -> str:
    """Roman to Arabic: 8(2) for VIII(2)."""
    roman = re.match("[IVXLC]+", number)[0]
    values = [DIGITS[digit] for digit in roman]
    total = sum(-a if a < b else a for a, b in zip(values, [*values[1:], 0]))
    return f"{total}{folded(number[len(roman) :]).replace(' ', '')}"
