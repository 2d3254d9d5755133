"""The items of a text, and law reports among them: U.S. ones by the names in reporters-db, others by a list or form."""

import calendar
import re
from dataclasses import dataclass, replace
from functools import cache

YEAR = r"[12]\d{3}(?!\d)"
ABBREVIATED = {"co", "ltd", "inc", "corp", "bros", "no", "st", "dr", "mr", "mrs", "ms", "jr", "anor", "ors", "etc"}
AT = {"at", "p", "pp", "page", "pages", "para", "paras", "n"}  # before a page or paragraph of a report
# Reports cited without their year in brackets; with it, any abbreviation is a report.
OTHERS = """
AC|App Cas|QB|QBD|KB|Ch|Ch D|Fam|P|PD|CPD|Ex D|WLR|All ER|All ER (D)|All ER (Comm)|ER|TLR|LT|LJ|LJKB|LJQB|LJ Ch|LJ Ex|
Cr App R|Cr App R (S)|Cr App Rep|Lloyd's Rep|Lloyds Rep|ICR|IRLR|BCLC|BCC|EHRR|ECHR|CMLR|ECR|HL Cas|HLC|LR HL|LR QB|
LR CP|LR Ex|LR Eq|LR Ch App|Ch App|B & S|B & Ald|B & Ad|B & C|M & W|Ad & E|E & B|El & Bl|H & N|H & C|Ex|Exch|CB|CB NS|
CB (NS)|Bing|Bing NC|Burr|Cowp|Term Rep|TR|Taunt|Camp|Stark|C & P|Co Rep|Str|Salk|Ld Raym|Mod|Ves|Ves Jr|Beav|Hare|
De GM & G|Mac & G|My & Cr|Ph|Russ|Sim|P & CR|EGLR|HLR|FLR|FCR|RPC|FSR|TC|STC|SC|SC (HL)|SLT|SCLR|CLR|ALR|NSWLR|VR|
DLR|SCR|OR|NZLR|IR|ILRM|SCC|AIR|LGR|RTR|JP|BMLR|PNLR|PIQR|Med LR|WN|Sol Jo|NI|BLR|Con LR|JPL|Bus LR|Env LR|OJ
"""


def folded_name(name: str) -> str:
    return re.sub(r"[\W_]", "", name).casefold()


@cache
def _known() -> dict[str, str]:
    from reporters_db import EDITIONS, VARIATIONS_ONLY  # loaded by the first text that is read

    spelled = {other: names[0] for other, names in VARIATIONS_ONLY.items()} | {name: name for name in EDITIONS}
    american = {folded_name(other): folded_name(name) for other, name in spelled.items()}
    return american | {name: name for name in map(folded_name, OTHERS.replace("\n", "").split("|"))}


def reporter(name: str) -> str | None:
    """The one name of a series that is cited under several ("US" and "U.S. Rep." → "us"), in lower case and without
    spaces and punctuation; None if it is not known."""
    return _known().get(name)


@dataclass(frozen=True, slots=True)
class Item:
    """A word of a text, or one or more places in an authority. norm: the form used in comparisons; start, end:
    character range in the text; gap: the text between the previous item and this one; big: begins with a capital; role:
    "report" or "law" (the number of a law, such as SI 1998/1833), else empty; dated: the year of a report."""

    norm: str
    start: int
    end: int
    gap: str
    big: bool
    places: tuple[str, ...] = ()
    role: str = ""
    dated: str = ""

    @property
    def abbreviated(self) -> bool:
        """Whether a full stop after this item may belong to it."""
        return self.norm in ABBREVIATED and self.end - self.start <= len("corp")

    @property
    def year(self) -> bool:
        return bool(re.fullmatch(YEAR, self.norm))


def with_reports(found: list[Item]) -> list[Item]:
    """The items, with those of each report and its pinpoints ("[2007] UKHL 17 at [120] (HL)") merged into one."""
    merged: list[Item] = []
    at = 0
    while at < len(found):
        item, end = found[at], at + 1
        if (report := _report(found, at)) or item.role == "report":
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
        if item.places or item.role or not set(item.gap) <= set(" .'()" if words else " ,)]"):
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
