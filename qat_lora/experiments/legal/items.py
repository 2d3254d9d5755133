"""Citations as written in texts, read by one grammar into an authority's keys, which are equal for all its spellings.

"Limitation Act 1980, s 5", "LIMITATION ACT 1980 section 5" and "s. 5 of the Limitation Act, 1980" have the same key, as
do "Roe v. Wade, 410 U. S. 113 (1973)" and "Roe v Wade (1973) 410 US 113". A text is read once into items (words, places
such as s 5(1), reports such as [1976] QB 286, numbers such as SI 1998/1833); everything else works on those items, in
time linear in the length of the text.
"""

import re
from dataclasses import replace
from functools import lru_cache

from qat_lora.data.appearance import GLYPHS, MARKS, folded, plain
from qat_lora.data.supervised import MONTHS
from qat_lora.experiments.legal.places import PLACES, places_of
from qat_lora.experiments.legal.reports import YEAR, Item, with_reports

ONE, MANY = ("|".join(words) for words in zip(*PLACES.values()))
# Rules of court, which are the same with and without their year
COURTS = {"cpr": "civil procedure rules", "fpr": "family procedure rules", "crimpr": "criminal procedure rules"}
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
SHORTER = {"and": "&", "vs": "v", "versus": "v", "regina": "r", "rex": "r", "company": "co", "limited": "ltd",
           "incorporated": "inc", "corporation": "corp", "brothers": "bros"}  # fmt: skip
DEEPEST = 4  # maximum depth of nested places
SERIES = {"statutoryinstrument": "si", "statutoryinstruments": "si", "publicl": "publ", "publaw": "publ",
          "publiclaw": "publ", "reg": "regulation", "dir": "directive"}  # fmt: skip
EMPHASIS = "*_"


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
    return with_reports(found)


def _kind(match: re.Match) -> str:
    return (
        "report"
        if match["docket"] or match["application"] or match["ecli"]
        else "law"
        if match["serial"] or match["european"]
        else ""
    )


def _read(match: re.Match) -> list[tuple[str, tuple[str, ...], int, int]]:
    """The (norm, places, start, end) of each item in a match; empty if it adds nothing to an authority."""
    start, end = match.span()
    places = places_of(match)
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


@lru_cache(1 << 14)
def _norm(word: str) -> str:
    """A word in a form that does not depend on case, dots, apostrophes and abbreviation."""
    word = folded(word)
    if word[:1].isdecimal():
        return word.removesuffix("'s").replace("'", "")
    word = re.sub("[.' ]", "", word)
    return SHORTER.get(word, word)
