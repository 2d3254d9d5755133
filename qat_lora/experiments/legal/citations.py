"""Citations as written in texts, and a key that is equal for all spellings of one authority.

"Limitation Act 1980, s 5", "LIMITATION ACT 1980 section 5" and "s. 5 of the Limitation Act, 1980" have the same key, as
do "Roe v. Wade, 410 U. S. 113 (1973)" and "Roe v Wade (1973) 410 US 113". A text is read once into items (words, and
places such as s 5(1)); everything else works on those items, in time linear in the length of the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from qat_lora.data.appearance import GLYPHS, MARKS, folded, plain

# The words before a place in an authority, by short form: (for one place, for several)
PLACES = {
    "s": ("s|sect?|section|§", "ss|sects|secs|sections|§ ?§"),
    "reg": ("reg|regulation", "regs|regulations"),
    "art": ("art|article|artikel|artículo", "arts|articles|artikeln|artículos"),
    "r": ("r|rule", "rr|rules"),
    "para": ("para?|paragraph|¶", "paras|paragraphs|¶ ?¶"),
    "sch": ("sch|sched|schedule", "schedules"),
    "pt": ("pt|part", "pts|parts"),
}
ONE, MANY = ("|".join(words) for words in zip(*PLACES.values()))
# Rules of court, which are the same with and without their year
COURTS = {"cpr": "civil procedure rules", "fpr": "family procedure rules", "crimpr": "criminal procedure rules"}
YEAR = r"[12]\d{3}(?!\d)"
CHAR = r"[^\s!-/:-@\[-`{-~§¶]"  # a character of a word; GLYPHS leaves no other punctuation
LETTER = rf"[^\W\d_][{MARKS}]*+"
CLUSTER = re.compile(rf"(?s:.)[{MARKS}]{{0,8}}+")
BRACKET = r"(?: ?\((?:\d{1,3}[a-z]?|[a-z]{1,2}|[ivx]{1,4})\))"
BRACKETS = rf"{BRACKET}*+"
NUMBER = rf"\d{CHAR}*+(?:(?:\.(?=\d)|[/-]| - (?=\d)(?!{YEAR})){CHAR}++)*+{BRACKETS}"
SPAN = rf"{NUMBER}(?: to (?=\d)(?!{YEAR}){NUMBER})?+"
ROMAN = rf"(?-i:[IVXLC]{{1,6}})(?!{CHAR}){BRACKETS}"
TOKEN = re.compile(
    rf"(?i:(?<!{CHAR})(?<!{CHAR}')(?:(?P<many>{MANY})\.?(?<!rules)(?<!regulations) ?(?P<list>{SPAN}"
    rf"(?:(?:, ?(?:(?:and|or) |& )?| (?:and|or|&|und|et|y) )(?!{YEAR}){SPAN})*+)"
    rf"|(?P<several>rules|regulations) (?!{YEAR})(?P<numbers>{NUMBER})"
    rf"|(?P<one>{ONE})(?:\. ?| ?)(?P<number>{NUMBER}(?: (?:et|und|y) {NUMBER})*+)"
    rf"|(?P<article>art|article)\.? (?P<lettered>(?-i:[LRD])\.? ?{NUMBER})"  # of a French code
    rf"|(?P<part>art|article|sch|schedule|pt|part)\.? (?P<roman>{ROMAN})"
    rf"|(?P<under>sub-?(?:sections?|sects?|ss?)|(?:sub-?)?(?:paragraphs?|paras?))\.?(?P<within>{BRACKET}++)"
    rf"|abs(?:atz)?\.? ?(?P<absatz>\d++[a-z]?)(?!{CHAR})"
    rf"|(?:u\.? ?s\.? ?c|c\.? ?f\.? ?r)\b\.? (?P<code>{NUMBER})"  # 42 USC 1983 is 42 U.S.C. § 1983
    rf"|(?:case )?(?P<docket>[ct]-\d++/\d\d)(?!{CHAR})"  # of the Court of Justice of the EU
    rf"|(?<=\d )ff?(?!{CHAR})\.?"  # and the sections that follow
    rf"|(?<=\()on the application of (?P<claimant>)"
    rf"|(?P<court>{'|'.join(COURTS)})(?!{CHAR})(?:,? (?P<rule>\d++\.{NUMBER}))?+"
    # the chapter of an Act of that year, "1980 c. 58" or "1980 (c 58)", which adds nothing to the year
    rf"|(?<=\d{{4}} )(?P<chapter>\(ch?\.? ?\d{{1,3}}\)|ch?\. ?\d{{1,3}})(?!{CHAR})))"
    # initials, "U.S.C." or "U. S. C.", but not the "v." between two parties
    rf"|(?P<initials>(?![vV]\.){LETTER}(?:\.(?!v\b){LETTER}(?!{CHAR})|\. (?![vV]\.){LETTER}(?=\.))++\.?)"
    rf"|(?P<word>{CHAR}++(?:(?:['/-]|(?<=\d)\.(?=\d)){CHAR}++)*+|[§¶&])"
)
# Words next to a place ("section 5 of the …") and words before a citation that are not part of it
CONNECTORS = {"of", "the", "in", "to", "under", "du", "de", "la", "le", "les", "des", "del", "der", "dem", "das"}
OPENINGS = {"see", "also", "as", "in", "under", "the", "by", "&", "of", "but", "cf", "per", "pursuant", "according",
            "to", "with", "compare", "contrast", "applying", "following", "citing"}  # fmt: skip
ABBREVIATED = {"co", "ltd", "inc", "corp", "bros", "no", "st", "dr", "mr", "mrs", "ms", "jr", "anor", "ors", "etc"}
SHORTER = {"and": "&", "vs": "v", "versus": "v", "regina": "r", "rex": "r", "company": "co", "limited": "ltd",
           "incorporated": "inc", "corporation": "corp", "brothers": "bros"}  # fmt: skip
DIGITS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}
DEEPEST = 4  # maximum depth of nested places
ENACTED = {"act", "regulations", "order", "rules"}  # a statute if a year follows
NOTHING = {"none", "nil", "null", "n/a", "na", "not applicable", "no authority"}
EMPHASIS = "*_"


@dataclass(frozen=True, slots=True)
class Item:
    """A word of a text, or one or more places in an authority. norm: the form used in comparisons; start, end:
    character range in the text; gap: the text between the previous item and this one; big: begins with a capital."""

    norm: str
    start: int
    end: int
    gap: str
    big: bool
    places: tuple[str, ...] = ()

    @property
    def abbreviated(self) -> bool:
        """Whether a full stop after this item may belong to it."""
        return self.norm in ABBREVIATED and self.end - self.start <= len("corp")

    @property
    def year(self) -> bool:
        return bool(re.fullmatch(YEAR, self.norm))


def items(text: str) -> list[Item]:
    """The words and places of a text, in order."""
    signs: list[str] = []
    starts: list[int] = []  # where in the text each character of `signs` comes from
    ends: list[int] = []
    for cluster in CLUSTER.finditer(text):
        char = cluster[0]
        if char[0] in MARKS:  # surplus combining marks, which would take quadratic time to sort
            continue
        spelled = plain(char) if len(char) > 1 else "" if char in EMPHASIS else GLYPHS[ord(char)]
        if not (spelled == " " and signs[-1:] == [" "]):
            signs += spelled
            starts += [cluster.start()] * len(spelled)
            ends += [cluster.end()] * len(spelled)
    seen, last, found = "".join(signs), 0, []
    for match in TOKEN.finditer(seen):
        read = [part for part in _read(match) if part[0].strip(MARKS)]
        for at, (norm, places, start, end) in enumerate(read):
            big = not places and (seen[start].isupper() or seen[start].istitle())
            gap = " " if at else seen[last:start]
            _add(found, Item(norm, starts[start], ends[end - 1], gap, big, places))
        last = match.end() if read or match["chapter"] else last
    return found


def _read(match: re.Match) -> list[tuple[str, tuple[str, ...], int, int]]:
    """The (norm, places, start, end) of each item in a match; empty if it adds nothing to an authority."""
    start, end = match.span()
    places = _places(match)
    norm = " ".join(places) or _norm(match["within"] or (f"({match['absatz']})" if match["absatz"] else match[0]))
    if match["chapter"] or match["claimant"] is not None:
        return []
    if match["court"]:
        read = [(word, (), start, match.end("court")) for word in COURTS[folded(match["court"])].split()]
        return read + ([(norm, places, match.start("rule"), end)] if places else [])
    if match["code"]:
        at = match.start("code")
        return [(re.sub("[. ]", "", folded(match[0][: at - start])), (), start, at - 1), (norm, places, at, end)]
    if match["word"] and all(piece[:1].isalpha() for piece in match[0].split("-")):  # Attorney-General
        return [
            (_norm(piece[0]), (), start + piece.start(), start + piece.end())
            for piece in re.finditer("[^-]+", match[0])
        ]
    return [(norm, places, start, end)]


def _add(found: list[Item], item: Item) -> None:
    """Append an item, merged with the items before it if they form one: "Act of 1980" is "Act 1980", "subsection (1) of
    section 5" is "section 5(1)", "para 3 of Schedule 2" is one place, and the year of rules of court is dropped."""
    before = found[-1] if found else None
    norms = [other.norm for other in found[-3:]]
    beside = bool(before and before.places) and set(item.gap) <= set(" ,")
    if item.year and norms[-1:] == ["of"] and norms[-2:-1] in (["act"], ["regulations"]):
        found[-1:] = [replace(item, gap=before.gap)]
    elif item.year and " ".join(norms) in COURTS.values():
        found[-1] = replace(before, end=item.end)
    elif item.norm == "states" and norms[-1:] == ["united"]:
        found[-1] = replace(before, norm="us", end=item.end)
    elif beside and len(before.places) == 1 and (item.norm.startswith("(") or item.norm in ("f", "ff")):
        place = before.norm + item.norm
        found[-1] = replace(before, norm=place, end=item.end, places=(place,))
    elif item.norm[0].isdecimal() and norms[-1:] == ["no"]:
        found[-1] = replace(item, gap=before.gap)
    else:
        found.append(_within(found, item))


def _within(found: list[Item], item: Item) -> Item:
    """A place merged with the places within it that come before ("para 3 of …"), which are removed from `found`."""
    while item.places and len(found) > 1 and found[-1].norm in ("of", "to"):
        before = found[-2]
        if before.norm.startswith("(") and len(item.places) == 1:
            places = (item.norm + before.norm,)
        elif 0 < len(before.places) <= DEEPEST - len(item.places):
            places = (*before.places, *item.places)
        else:
            break
        del found[-2:]
        item = replace(before, norm=" ".join(places), end=item.end, places=places)
    return item


def _places(match: re.Match) -> tuple[str, ...]:
    """("s 5(1)", "s 6") for "sections 5 (1) and 6"; () if the match is not a place."""
    if match["docket"]:
        return (folded(match["docket"]),)
    opening = match["many"] or match["several"] or match["one"] or match["article"] or match["part"]
    opening = opening or (match["rule"] and "r") or (match["code"] and "s")
    if opening is None:
        return ()
    if match["roman"]:
        return (f"{_short(folded(opening))} {_arabic(match['roman'])}",)
    if match["lettered"]:
        return (f"{_short(folded(opening))} {re.sub('[. ]', '', folded(match['lettered']))}",)
    numbers = match["list"] or match["numbers"] or match["number"] or match["rule"] or match["code"]
    return tuple(
        f"{_short(folded(opening))} {folded(number).replace(' to ', '-').replace(' ', '')}"
        for number in re.findall(SPAN, numbers, re.IGNORECASE)
    )


@lru_cache
def _short(opening: str) -> str:
    return next(short for short, words in PLACES.items() if re.fullmatch("|".join(words), opening))


def _arabic(number: str) -> str:
    """Roman to Arabic: 8(2) for VIII(2)."""
    roman = re.match("[IVXLC]+", number)[0]
    values = [DIGITS[digit] for digit in roman]
    total = sum(-a if a < b else a for a, b in zip(values, [*values[1:], 0]))
    return f"{total}{folded(number[len(roman) :]).replace(' ', '')}"


@lru_cache(1 << 14)
def _norm(word: str) -> str:
    """A word in a form that does not depend on case, dots, apostrophes and abbreviation."""
    word = folded(word)
    if word[:1].isdecimal():
        return word.removesuffix("'s").replace("'", "")
    word = re.sub("[.' ]", "", word)
    return SHORTER.get(word, word)


# -- one citation ----------------------------------------------------------------------------------------------------
def content(found: Sequence[Item]) -> list[Item]:
    """The words that identify a citation, without places, words that introduce it ("see"), and words that join a place
    to its Act ("of the")."""
    words: list[Item] = []
    beside = False
    for item in found:
        if item.places:
            while words and words[-1].norm in CONNECTORS:
                words.pop()
            beside = True
        elif item.norm != "the" and not (beside and item.norm in CONNECTORS):
            words.append(item)
            beside = False
    first, last = 0, len(words)
    while first < last - 1 and words[first].norm in OPENINGS:
        first += 1
    while first < last - 1 and words[last - 1].norm == "&":
        last -= 1
    return words[first:last]


def key(found: Sequence[Item]) -> str:
    """A key that is equal for all spellings of one authority: its words in order, then its years and places, sorted."""
    words = content(found)
    tail = {item.norm for item in words if item.year}.union(*(item.places for item in found))
    return " | ".join([" ".join(item.norm for item in words if not item.year), *sorted(tail)])


def single_places(title: Sequence[Item], places: Sequence[Item]) -> list[list[Item]]:
    """For a title with several places of one kind ("ss 5 and 6"), one citation per place; otherwise empty."""
    atoms = [atom for item in places for atom in item.places]
    if len({atom.split()[0] for atom in atoms}) != 1 or len(atoms) == 1:
        return []
    return [[*title, Item(atom, 0, 0, "", False, (atom,))] for atom in atoms]


def without_year(found: Sequence[Item]) -> list[Item] | None:
    """A case with its report and no year, "Roe v Wade, 410 US 113"; None for any other citation."""
    left = [item for item in found if not item.year]
    title = case_title(left)
    return left if title and len(left) < len(found) and len(content(left)) > len(title) + 1 else None


def case_title(found: Sequence[Item]) -> list[Item] | None:
    """The parties of a case, without its report; None if this is not a case."""
    words = content(found)
    at = next((at for at, item in enumerate(words) if item.norm == "v" and at), None)
    if at is None:
        return None
    end = next((end for end in range(at + 1, len(words)) if words[end].norm[0].isdecimal()), len(words))
    return words[:end] if end > at + 1 else None


def written(text: str, found: Sequence[Item]) -> str:
    """A citation as the text spells it, without emphasis marks and with single spaces."""
    start, end = found[0].start, found[-1].end
    for opening, closing in ("()", "[]"):
        more = text.count(opening, start, end) - text.count(closing, start, end)
        if more < 0 and text[start - 1 : start] == opening:
            start -= 1
        elif more > 0 and text[end : end + 1] == closing:
            end += 1
    if found[-1].abbreviated and text[end : end + 1] == ".":
        end += 1
    return _tidy(text[start:end])


def _tidy(text: str) -> str:
    """A text without emphasis marks and with single spaces; a space that carries an accent (´ in NFKC) stays."""
    return re.sub(rf"\s+(?![{MARKS}])", " ", re.sub(f"[{EMPHASIS}]", "", text)).strip()


# -- a citation section ----------------------------------------------------------------------------------------------
def entries(section: str) -> list[tuple[str, list[list[Item]]]]:
    """The entries of a citation section, separated by semicolons or line ends, each with the items of its citations. An
    entry has several citations if they are joined by "and" or a comma and each can stand alone. Entries without words,
    and those that say there is nothing to cite ("none"), are left out."""
    lines = "".join("\n" if {"\n", ";"} & set(GLYPHS[ord(char)]) else char for char in section).split("\n")
    found = [(line, items(line)) for line in map(_tidy, lines)]
    return [
        (line, _grouped(words))
        for line, words in found
        if words and " ".join(item.norm for item in words) not in NOTHING
    ]


def citations(section: str) -> dict[str, str]:
    """The citations of a citation section: {key: the citation as the section spells it}."""
    found: dict[str, str] = {}
    for entry, groups in entries(section):
        for group in groups:
            found.setdefault(key(group), written(entry, group))
    return found


def _grouped(found: Sequence[Item]) -> list[list[Item]]:
    """The items of an entry, grouped by citation."""
    pieces: list[list[Item]] = []
    depth = 0
    for item in found:
        cut = not pieces
        for sign in "" if not pieces or [other.norm for other in pieces[-1][:2]] == ["&"] else item.gap:
            depth = max(0, depth + (sign in "([") - (sign in ")]"))
            cut |= sign == "," and not depth and not item.places
        depth = 0 if cut else depth
        if cut or (item.norm == "&" and not depth):
            pieces.append([])
        pieces[-1].append(item)
    groups: list[list[Item]] = []
    whole = False  # whether the last group can stand alone
    for piece in pieces:
        alone = _whole(piece)
        if groups and not (alone and (whole or _whole(groups[-1]))):
            groups[-1] += piece
        else:
            groups.append(piece[1:] if groups and piece[0].norm == "&" else piece)
        whole |= alone
    return groups


def _whole(piece: Sequence[Item]) -> bool:
    """Whether a piece of an entry can stand alone: a place with a title, a case, or a statute with its year."""
    names = [
        item for item in piece if item.norm[0].isalpha() and not item.places and item.norm not in OPENINGS | CONNECTORS
    ]
    norms = [item.norm for item in piece]
    if "v" in norms[1:-1] or (names and any(item.places for item in piece)):
        return True
    enacted = next((at for at, norm in enumerate(norms) if norm in ENACTED), len(norms))
    dated = any(item.year for item in piece[enacted:])
    return (dated and len(names) > 1) or ("re" in norms[:2] and any(norm[0].isdecimal() for norm in norms))
