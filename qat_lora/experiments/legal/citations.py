"""Citations as written in texts, read by one grammar into an authority's keys, which are equal for all its spellings.

"Limitation Act 1980, s 5", "LIMITATION ACT 1980 section 5" and "s. 5 of the Limitation Act, 1980" have the same key, as
do "Roe v. Wade, 410 U. S. 113 (1973)" and "Roe v Wade (1973) 410 US 113". A text is read once into items (words, places
such as s 5(1), reports such as [1976] QB 286, numbers such as SI 1998/1833); everything else works on those items, in
time linear in the length of the text.
"""

import calendar
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from qat_lora.data.appearance import GLYPHS, MARKS, folded, plain
from qat_lora.data.supervised import MONTHS
from qat_lora.experiments.legal.reporters import reporter

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
ONE, MANY = ("|".join(words) for words in zip(*PLACES.values()))
# Rules of court, which are the same with and without their year
COURTS = {"cpr": "civil procedure rules", "fpr": "family procedure rules", "crimpr": "criminal procedure rules"}
YEAR = r"[12]\d{3}(?!\d)"
CHAR = r"[^\s!-/:-@\[-`{-~§¶]"  # a character of a word; GLYPHS leaves no other punctuation
LETTER = rf"[^\W\d_][{MARKS}]*+"
BODIES = "eu|ec|eec|euratom|jha|cfsp|ecsc"  # of the European Union
CLUSTER = re.compile(rf"(?s:.)[{MARKS}]{{0,8}}+")
BRACKET = r"(?: ?\((?:\d{1,3}[a-z]?|[a-z]{1,2}|[ivx]{1,4})\))"
BRACKETS = rf"{BRACKET}*+"
NUMBER = rf"\d{CHAR}*+(?:(?:\.(?=\d)|[/-]| - (?=\d)(?!{YEAR})){CHAR}++)*+{BRACKETS}"
AND = r"(?:, ?(?:(?:and|or) |& ?)?| (?:and|or|&|und|et|y) )"
FURTHER = rf"(?:(?: ?- ?| to |{AND}){BRACKET}++)*+"  # s 2(1)-(3), s 53(1)(b) and (c)
SPAN = rf"{NUMBER}{FURTHER}(?:(?: to | ?- ?)(?=\d)(?!{YEAR}){NUMBER}{FURTHER})?+"
ROMAN = rf"(?-i:[IVXLC]{{1,6}})(?!{CHAR}){BRACKETS}"
TOKEN = re.compile(
    rf"(?i:(?<!{CHAR})(?<!{CHAR}')(?:"
    rf"(?P<union>regulation|directive|decision|reg|dir)\.?(?: ?\((?:{BODIES})(?:, ?(?:{BODIES}))*\))?(?: no\.?)? ?"
    rf"(?P<european>\d{{1,4}}/\d{{1,4}})(?:/(?:{BODIES}))?(?!{CHAR})(?: of \d{{1,2}} (?:{MONTHS}) {YEAR})?"
    rf"|(?P<many>{MANY})\.?(?<!rules)(?<!regulations) ?(?P<list>{SPAN}"
    rf"(?:{AND}(?!{YEAR}){SPAN})*+)"
    rf"|(?P<several>rules|regulations) (?!{YEAR})(?P<numbers>{NUMBER}{FURTHER})"
    rf"|(?P<one>{ONE})(?:\. ?| ?)(?P<number>{NUMBER}{FURTHER}(?: (?:et|und|y) {NUMBER})*+)"
    rf"|(?P<article>art|article)\.? (?P<lettered>(?-i:[LRD])\.? ?{NUMBER})"  # of a French code
    rf"|(?P<part>art|article|sch|schedule|pt|part|amend|amendment)\.? (?P<roman>{ROMAN})"
    rf"|(?P<under>sub-?(?:sections?|sects?|ss?)|(?:sub-?)?(?:paragraphs?|paras?))\.?(?P<within>{BRACKET}++)"
    rf"|abs(?:atz)?\.? ?(?P<absatz>\d++[a-z]?)(?!{CHAR})"
    rf"|(?:u\.? ?s\.? ?c|c\.? ?f\.? ?r)\b\.? (?P<code>{NUMBER})"  # 42 USC 1983 is 42 U.S.C. § 1983
    rf"|(?:joined )?(?:cases? )?(?P<docket>[ctf]-\d++/\d\d)(?: ?p)?(?!{CHAR})"  # of the Court of Justice of the EU
    rf"|app(?:lication|l)?\.? nos?\.? (?P<application>\d{{1,5}}/\d\d)(?!{CHAR})"  # to the Court at Strasbourg
    r"|(?:ecli ?: ?)?(?P<ecli>[a-z]{2}:[a-z]{1,7}:\d{4}:[a-z\d.]{1,25}(?<!\.))"
    rf"|(?P<series>(?:s|w\.? ?s|s\.? ?s)\.? ?i|s\.? ?r|statutory instruments?|pub(?:lic|\.)? ?l(?:aw|\.)?)\.?,? "
    rf"?(?:nos?\.? ?)?(?P<serial>\d{{2,4}}(?: ?[/-] ?|,? no\.? ?)\d{{1,4}})(?!{CHAR})"
    rf"|(?<=\d )ff?(?!{CHAR})\.?"  # and the sections that follow
    rf"|(?<=\()on the application of (?P<claimant>)"
    rf"|(?P<court>{'|'.join(COURTS)})(?!{CHAR})(?:,? (?P<rule>\d++\.{NUMBER}))?+"
    # the chapter of an Act of that year, "1980 c. 58" or "1980 (c 58)", which adds nothing to the year
    rf"|(?<=\d{{4}} )(?P<chapter>\((?:ch?|asp|asc|anaw|nawm)\.? ?\d{{1,3}}\)|ch?\. ?\d{{1,3}})(?!{CHAR})))"
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
SERIES = {"statutoryinstrument": "si", "statutoryinstruments": "si", "publicl": "publ", "publaw": "publ",
          "publiclaw": "publ", "reg": "regulation", "dir": "directive"}  # fmt: skip
# Words that end the name of a law: of one with a year, and of one with a place in it
ENACTED = {"act", "regulations", "order", "rules", "measure", "ordinance"}
ADOPTED = {"convention", "constitution", "const", "code", "treaty", "charter", "protocol", "statute", "gdpr"}
MAKERS = {"council", "commission", "parliament", "european", "delegated", "implementing", "framework", "eu", "ec"}
AT = {"at", "p", "pp", "page", "pages", "para", "paras", "n"}  # before a page or paragraph of a report
FELLOWS = {"anor", "ors", "another", "others"}  # parties without a name
NOTHING = {"none", "nil", "null", "n/a", "na", "not applicable", "no authority"}
EMPHASIS = "*_"


@dataclass(frozen=True, slots=True)
class Item:
    """A word of a text, or one or more places in an authority. norm: the form used in comparisons; start, end:
    character range in the text; gap: the text between the previous item and this one; big: begins with a capital; kind:
    "report" or "law" (the number of a law, such as SI 1998/1833), else empty; dated: the year of a report."""

    norm: str
    start: int
    end: int
    gap: str
    big: bool
    places: tuple[str, ...] = ()
    kind: str = ""
    dated: str = ""

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
            _add(found, Item(norm, starts[start], ends[end - 1], gap, big, places, _kind(match)))
        last = match.end() if read or match["chapter"] else last
    return _with_reports(found)


def _kind(match: re.Match) -> str:
    return (
        "report"
        if match["docket"] or match["application"] or match["ecli"]
        else "law"
        if match["serial"] or match["european"]
        else ""
    )


def _with_reports(found: list[Item]) -> list[Item]:
    """The items, with those of each report and its pinpoints ("[2007] UKHL 17 at [120] (HL)") merged into one."""
    merged: list[Item] = []
    at = 0
    while at < len(found):
        item, end = found[at], at + 1
        if (report := _report(found, at)) or item.kind == "report":
            item, end = report or (item, end)
            item, end = _suffixed(found, item, end)
        merged.append(item)
        at = end
    return merged


def _report(found: list[Item], at: int) -> tuple[Item, int] | None:
    """The report that begins at an item and the end of it: [1976] QB 286, (1880) 5 CPD 344, 410 U.S. 113."""
    first, year = found[at], ""
    if first.gap[-1:] in ("(", "[") and re.fullmatch(rf"{YEAR}(?:[-/]\d\d(?:\d\d)?)?", first.norm):
        year, at = first.norm[:4], at + 1
        if at == len(found) or found[at].gap.strip(" ,") not in (")", "]"):
            return None
    volume = ""
    if at + 1 < len(found) and found[at].norm.isdecimal() and len(found[at].norm) < 5:
        volume, at = found[at].norm + " ", at + 1
    if not (year or volume):
        return None
    words: list[Item] = []
    while at < len(found) and len(words) < 7:
        item = found[at]
        if words and re.fullmatch(r"r \d+", item.norm):  # "Cr App R 751" ends like a rule of court
            words.append(replace(item, norm="r", big=True))
            break
        if item.places or item.kind or not set(item.gap) <= set(" .'()" if words else " ,)]"):
            return None
        if "(" in item.gap and item.norm.isdecimal():  # 5 U.S. (1 Cranch) 137
            at = next((end for end in range(at + 1, min(at + 5, len(found))) if ")" in found[end].gap), len(found))
            if at == len(found):
                return None
            item = found[at]
        if (
            words
            and re.fullmatch(r"\d{1,6}[a-z]?", item.norm)
            and not re.fullmatch(r"\dd|\d(?:st|nd|rd|th)", item.norm)
        ):
            break
        words.append(item)
        at += 1
    else:
        return None
    name = re.sub(r"\W", "", "".join(item.norm for item in words))
    series = reporter(name)
    short = all((item.big or item.norm == "&" or item.norm[0].isdecimal()) and len(item.norm) < 7 for item in words)
    if not ((series and (words[0].big or (len(name) > 1 and year))) or (year and short)):
        return None
    page = found[at]
    if not year and page.year and words[0].norm[:3].title() in calendar.month_abbr:  # a date
        return None
    norm = f"{volume}{series or name} {page.norm.removeprefix('r ')}"
    return Item(norm, first.start, page.end, first.gap, True, (), "report", year), at + 1


def _suffixed(found: list[Item], item: Item, at: int) -> tuple[Item, int]:
    """A report with what may follow it, and where that ends: a court, the year of an American report, and pages or
    paragraphs."""
    while at < len(found) and not _report(found, at):
        if _opens(found[at]):
            end = _closing(found, at)
            if not all(other.big or other.norm[0].isdecimal() for other in found[at:end]):
                break
            years = [other.norm for other in found[at:end] if other.year]
            item = replace(item, dated=item.dated or (years[-1] if years else ""))
        else:
            end = _pinpoint(found, at)
        if end == at:
            break
        item, at = replace(item, end=found[end - 1].end), end
    return item, at


def _opens(item: Item) -> bool:
    """Whether a remark in round brackets begins right before an item."""
    return item.gap.strip(" ])") == "("


def _closing(found: list[Item], at: int) -> int:
    """The end of the short remark in brackets that begins at an item; `at` if it is not closed soon."""
    ends = range(at + 1, min(at + 6, len(found)))
    return next((end for end in ends if ")" in found[end].gap), len(found) if len(found) - at < 6 else at)


def _pinpoint(found: list[Item], at: int) -> int:
    """The end of the page or paragraph that begins at an item: "at 580", ", 580-582", "[120]", "para 12"."""
    end, gap = at, found[at].gap
    if not set(gap) <= set(" ,.)[]-"):
        return at
    while end < len(found) and end < at + 2 and found[end].norm in AT:
        end += 1
    if end == len(found) or (found[end].places and not all(place.startswith("para ") for place in found[end].places)):
        return at
    here = found[end]
    page = re.fullmatch(r"\d{1,5}[a-z]?(?:-(?:\d{1,5}[a-z]?|[a-z]))?", here.norm)
    if here.places or here.norm in ("f", "ff") or (page and (end > at or set(gap) & set(",[-"))):
        return at if here.year and end == at else end + 1
    return at


def _read(match: re.Match) -> list[tuple[str, tuple[str, ...], int, int]]:
    """The (norm, places, start, end) of each item in a match; empty if it adds nothing to an authority."""
    start, end = match.span()
    places = _places(match)
    norm = " ".join(places) or _norm(match["within"] or (f"({match['absatz']})" if match["absatz"] else match[0]))
    if match["docket"] or match["application"] or match["ecli"]:
        return [(folded(match["docket"] or match["application"] or match["ecli"]), (), start, end)]
    if match["serial"] or match["european"]:
        series = re.sub("[. ]", "", folded(match["series"] or match["union"]))
        number = "/".join(re.findall(r"\d+", match["serial"] or match["european"]))
        return [(f"{SERIES.get(series, series)} {number}", (), start, end)]
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
        if item.kind or item.norm in FELLOWS:
            while words and item.norm in FELLOWS and words[-1].norm == "&":
                words.pop()
            beside = bool(item.kind)
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
        reports = _dated([item for item in found if item.kind == "report"])
        numbers = tuple(sorted({item.norm for item in found if item.kind == "law"}))
        first = next((at for at, item in enumerate(found) if item.kind == "report"), len(found))
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
    words = content(found[: next((at for at, item in enumerate(found) if item.kind == "report"), len(found))])
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
    titled = any(item.norm in ENACTED | ADOPTED or item.norm == "v" or item.kind for item in group)
    named = next((item for item in piece if item.norm != "&"), piece[0])
    return group[0].places != () and not titled and not named.places and piece[0].norm == "&"


def _whole(piece: Sequence[Item]) -> bool:
    """Whether a piece of an entry can stand alone: a place with a title, a case, or a statute with its year."""
    names = [
        item
        for item in piece
        if item.norm[0].isalpha() and not item.places and not item.kind and item.norm not in OPENINGS | CONNECTORS
    ]
    norms = [item.norm for item in piece]
    if "v" in norms[1:-1] or (names and any(item.places for item in piece)):
        return True
    enacted = next((at for at, norm in enumerate(norms) if norm in ENACTED), len(norms))
    dated = any(item.year for item in piece[enacted:])
    return (dated and len(names) > 1) or ("re" in norms[:2] and any(norm[0].isdecimal() for norm in norms))
