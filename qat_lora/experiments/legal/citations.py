"""Citations: what items of a text cite, and the keys that are equal for all spellings of one authority."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from qat_lora.data.appearance import GLYPHS, MARKS
from qat_lora.experiments.legal.items import EMPHASIS, items
from qat_lora.experiments.legal.reports import Item

# Words next to a place ("section 5 of the …") and words before a citation that are not part of it
CONNECTORS = {"of", "the", "in", "to", "under", "du", "de", "la", "le", "les", "des", "del", "der", "dem", "das"}
OPENINGS = {"see", "also", "as", "in", "under", "the", "by", "&", "of", "but", "cf", "per", "pursuant", "according",
            "to", "with", "compare", "contrast", "applying", "following", "citing"}  # fmt: skip
# Words that end the name of a law: of one with a year, and of one with a place in it
ENACTED = {"act", "regulations", "order", "rules", "measure", "ordinance"}
ADOPTED = {"convention", "constitution", "const", "code", "treaty", "charter", "protocol", "statute", "gdpr"}
MAKERS = {"council", "commission", "parliament", "european", "delegated", "implementing", "framework", "eu", "ec"}
FELLOWS = {"anor", "ors", "another", "others"}  # parties without a name
NOTHING = {"none", "nil", "null", "n/a", "na", "not applicable", "no authority"}


# -- one citation ----------------------------------------------------------------------------------------------------
def content(found: Sequence[Item]) -> list[Item]:
    """The words that identify a citation, without places, words that introduce it ("see"), and words that join a place
    to its Act ("of the")."""
    words: list[Item] = []
    beside = False
    for item in found:
        if item.role or item.norm in FELLOWS:
            while words and item.norm in FELLOWS and words[-1].norm == "&":
                words.pop()
            beside = bool(item.role)
        elif item.places:
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


def _dated(found: Sequence[Item]) -> tuple[tuple[str, str], ...]:
    """Reports with their years; the year after American reports, "384 U.S. 436, 86 S. Ct. 1602 (1966)", is that of
    all."""
    reports, year = {}, ""
    for item in reversed(found):
        year = item.dated or (year if item.norm[0].isdecimal() else "")
        reports[item.norm, year] = None
    return tuple(reversed(reports))


@dataclass(frozen=True, slots=True)
class Citation:
    """What a text cites at one place: a law by its title, its number or both, and the places in it; or a case by its
    parties, its reports or both. title: its words, without years; reports: (report, year or ""); bare: a
    title that is known, without a place or report."""

    title: str
    years: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    reports: tuple[tuple[str, str], ...] = ()
    numbers: tuple[str, ...] = ()
    case: bool = False
    bare: bool = False

    @classmethod
    def of(cls, found: Sequence[Item]) -> "Citation":
        """The citation that items form."""
        reports = _dated([item for item in found if item.role == "report"])
        numbers = tuple(sorted({item.norm for item in found if item.role == "law"}))
        first = next((at for at, item in enumerate(found) if item.role == "report"), len(found))
        parties = content(found[:first]) if reports else []
        words = parties if any(not item.year for item in parties) else content(found)
        years = tuple(sorted({item.norm for item in words if item.year}))
        names = [item.norm for item in words if not item.year]
        if numbers and set(names) <= MAKERS:
            names = []
        places = tuple(sorted({place for item in found for place in item.places}))
        case = bool(reports) or "v" in names[1:-1]
        return cls(" ".join(names), years, () if reports else places, reports, numbers, case)

    @property
    def names(self) -> list[str]:
        """The names of a law: its title with its year, and its numbers. European laws are known by their numbers, and
        what stands beside them describes them."""
        title = " ".join((self.title, *self.years))
        described = [number for number in self.numbers if not number.startswith("si ")]
        return [*described, title, *self.numbers] if self.title and not described else [*self.numbers] or [title]

    def keys(self) -> list[str]:
        """What has to be known for the citation to be right: each report with these parties, or each place in this
        law."""
        if self.reports:
            return [f"{self.title} | {report} | {year}" for report, year in self.reports]
        if self.case:
            return [" | ".join((self.title, *self.years, *self.places))]
        return [f"{self.names[0]} | {place}" for place in self.places] or [self.names[0]]

    @property
    def key(self) -> str:
        return "; ".join(sorted(self.keys()))

    def ways(self) -> list[tuple[str, set[str], set[str]]]:
        """For each authority cited: (its key, the keys of its other spellings, those of its shorter spellings, which
        hold if no other authority has them)."""
        if self.reports:
            full = {
                f"{title} | {report} | {other}"
                for report, year in self.reports
                for title in (self.title, "")
                for other in (year, "")
            }
            years = {year for _, year in self.reports} | {*self.years}
            return [(self.keys()[0], full, {self.title, *(f"{self.title} | {year}" for year in years)} - {""})]
        if self.case:
            return [(self.keys()[0], {self.keys()[0]}, {self.title})]
        return [
            (f"{self.names[0]} | {place}".removesuffix(" | "),
             {f"{name} | {place}".removesuffix(" | ") for name in self.names},
             {f"{self.title} | {place}".removesuffix(" | ")} if self.title else set())
            for place in self.places or ("",)
        ]  # fmt: skip


def case_title(found: Sequence[Item]) -> list[Item] | None:
    """The parties of a case, without its report; None if this is not a case."""
    words = content(found[: next((at for at, item in enumerate(found) if item.role == "report"), len(found))])
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
            found.setdefault(Citation.of(group).key, written(entry, group))
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
        if groups and not (alone and (whole or _whole(groups[-1])) and not _goes_on(groups[-1], piece)):
            groups[-1] += piece
        else:
            groups.append(piece[1:] if groups and piece[0].norm == "&" else piece)
        whole |= alone
    return groups


def _goes_on(group: Sequence[Item], piece: Sequence[Item]) -> bool:
    """Whether a piece of an entry continues the title of a law: "s 5 of the Police" and "and Criminal Evidence Act"."""
    titled = any(item.norm in ENACTED | ADOPTED or item.norm == "v" or item.role for item in group)
    named = next((item for item in piece if item.norm != "&"), piece[0])
    return group[0].places != () and not titled and not named.places and piece[0].norm == "&"


def _whole(piece: Sequence[Item]) -> bool:
    """Whether a piece of an entry can stand alone: a place with a title, a case, or a statute with its year."""
    names = [
        item
        for item in piece
        if item.norm[0].isalpha() and not item.places and not item.role and item.norm not in OPENINGS | CONNECTORS
    ]
    norms = [item.norm for item in piece]
    if "v" in norms[1:-1] or (names and any(item.places for item in piece)):
        return True
    enacted = next((at for at, norm in enumerate(norms) if norm in ENACTED), len(norms))
    dated = any(item.year for item in piece[enacted:])
    return (dated and len(names) > 1) or ("re" in norms[:2] and any(norm[0].isdecimal() for norm in norms))


# -- what is known -----------------------------------------------------------------------------------------------------
class Known:
    """Which spellings stand for which authority. above: what else is known."""

    def __init__(self, above: "Known | None" = None):
        self.above = above
        self.full: dict[str, str] = {}
        self.short: dict[str, set[str]] = defaultdict(set)

    def add(self, citation: Citation) -> None:
        """Learn what a citation says: which reports are of one case, and which title and number of one law."""
        for own, full, short in citation.ways():
            own = next((known for way in sorted(full) if self.named(way) and (known := self.of(way))), own)
            for way in full:
                self.full.setdefault(way, own)
            for way in short:
                self.short[way].add(own)

    @staticmethod
    def named(key: str) -> bool:
        """Whether a key names parties or a law, and not only a report."""
        return not key.startswith(" | ")

    def of(self, key: str) -> str | None:
        """The authority that a key stands for; None if it is unknown or, for a short spelling, not the only one."""
        if key in self.full:
            return self.full[key]
        if self.above and (own := self.above.of(key)):
            return own
        return next(iter(self.short[key])) if len(self.short.get(key, ())) == 1 else None

    def resolve(self, citation: Citation) -> tuple[set[str], set[str]]:
        """(known authorities, unknown keys) of a citation. A case is unknown as a whole if one of its reports is, or if
        they are of different cases."""
        keys = citation.keys()
        owners = {key: self.of(key) for key in keys}
        if citation.case:
            whole = len(set(owners.values())) == 1 and None not in owners.values()
            return (set(owners.values()), set()) if whole else (set(), {citation.key})
        for key in keys if citation.title and citation.numbers else ():
            place = key.partition(" | ")[2]
            by_number = {self.of(f"{number} | {place}".removesuffix(" | ")) for number in citation.numbers} - {None}
            if by_number and by_number != {owners[key]}:  # the number of another law
                owners[key] = None
        return {own for own in owners.values() if own}, {key for key, own in owners.items() if not own}
