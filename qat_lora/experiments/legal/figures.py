"""The figures of a text, each in one spelling and with its unit: sums of money, percentages, dates and periods."""

import calendar
import re
from decimal import Decimal

from qat_lora.data.appearance import plain

HALVES = str.maketrans({"¼": ".25", "½": ".5", "¾": ".75"})
ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
        "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]  # fmt: skip
TENS = ["ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORDS = {word: number for number, word in enumerate(ONES, 1)} | {word: 10 * n for n, word in enumerate(TENS, 1)}
CURRENCIES = {"gbp": "£", "usd": "$", "us$": "$", "eur": "€", "pound": "£", "dollar": "$", "euro": "€"}
SIZES = {"thousand": 3, "k": 3, "million": 6, "m": 6, "mn": 6, "billion": 9, "bn": 9, "trillion": 12, None: 0}
MONTHS = "|".join(f"{name[:3]}(?:{name[3:]}|t)?" if name[3:] else name for name in calendar.month_name[1:])

NUMBER = r"(?:(?:\d{1,3}(?:,\d{3}){1,5}+|\d{1,15}+)(?:\.\d{1,9}+)?+(?!\d)|\.\d{1,9}+(?!\d))"
SPELLED = rf"(?:(?:{'|'.join(TENS)})-(?:{'|'.join(ONES[:9])})|{'|'.join(sorted(WORDS, key=len, reverse=True))})"
SIZE = rf"(?: ?-?(?P<{{}}>{'|'.join(filter(None, SIZES))})\b)?"
UNIT = r"(?:(?:working|business|clear)[ -])?(?:minute|hour|day|week|fortnight|month|year)"
PERIOD = rf"(?:{NUMBER}|\b{SPELLED}\b)(?: and a half)?+[ -]?{UNIT}s?\b"
FIGURE = re.compile(
    rf"(?i:(?P<sign>[a-z]{{0,2}}\$|[£€¥₹]|\b(?:gbp|usd|eur)\b) ?(?P<sum>{NUMBER}){SIZE.format('size')}"
    r"|(?<![\d.,/\u2044-])(?:"
    rf"(?P<iso>\d{{4}}-[01]\d-[0-3]\d)(?!\d)"
    rf"|(?P<slashed>[0-3]?\d[/.][01]?\d[/.]\d{{4}})(?!\d)"
    rf"|(?P<day>[0-3]?\d)(?:st|nd|rd|th)? ?(?:of )?(?P<month>{MONTHS})\.?,? (?P<year>\d{{4}})\b"
    rf"|(?P<share>{NUMBER}) ?(?:%|per ?cent\b)"
    rf"|(?P<named>{NUMBER}){SIZE.format('many')} ?(?P<currency>€|(?:pound|dollar|euro)s?\b|(?:gbp|usd|eur)\b)"
    rf"|(?P<period>{PERIOD}(?:,? (?:and )?{PERIOD})*))"
    rf"|\b(?P<first>{MONTHS})\.? (?P<on>[0-3]?\d)(?:st|nd|rd|th)?,? (?P<in>\d{{4}})\b)"
)
PART = re.compile(
    rf"(?i:(?:(?P<number>{NUMBER})|\b(?P<word>{SPELLED}))(?P<half> and a half)?[ -]?(?P<unit>{UNIT})s?\b)"
)


def figures(text: str) -> list[str]:
    """The sums, percentages, dates and periods of a text, in order. Equal figures have equal spellings: "£3 Million"
    and "£3,000,000" are "£3000000.00", "the 3rd of May, 2027" is "3 May 2027", "Thirty Days" is "30 day"."""
    return [_canonical(match) for match in FIGURE.finditer(plain(text.translate(HALVES)))]


def figure(text: str) -> str | None:
    """The first figure of a text, see `figures`; None if there is none."""
    return next(iter(figures(text)), None)


def _canonical(match: re.Match) -> str:
    if number := match["sum"] or match["named"]:
        sign = (match["sign"] or match["currency"].rstrip("sS")).lower()
        size = SIZES[(match["size"] or match["many"] or "").lower() or None]
        return f"{CURRENCIES.get(sign, sign)}{_number(number).scaleb(size):.2f}"
    if match["share"]:
        return f"{_shown(_number(match['share']))}%"
    if match["period"]:
        return " ".join(map(_period, PART.finditer(match["period"])))
    if match["iso"]:
        year, month, day = map(int, match["iso"].split("-"))
    elif match["slashed"]:  # the day first, as in England
        day, month, year = map(int, re.split("[/.]", match["slashed"]))
    else:
        day, year = int(match["day"] or match["on"]), int(match["year"] or match["in"])
        short = (match["month"] or match["first"])[:3].title()
        month = next(number for number, name in enumerate(calendar.month_name) if name[:3] == short)
    return f"{day} {calendar.month_name[month] if 0 < month < 13 else month} {year}"


def _period(part: re.Match) -> str:
    word = (part["word"] or "").lower()
    number = _number(part["number"]) if part["number"] else Decimal(sum(WORDS[piece] for piece in word.split("-")))
    unit = part["unit"].lower().replace("-", " ")
    return f"{_shown(number + Decimal('0.5') * bool(part['half']))} {unit}"


def _number(digits: str) -> Decimal:
    return Decimal(digits.replace(",", ""))


def _shown(number: Decimal) -> str:
    """The shortest spelling of a number, without an exponent."""
    whole, point, rest = f"{number:f}".partition(".")
    return whole.lstrip("0").rjust(1, "0") + (point + rest).rstrip("0").rstrip(".")
