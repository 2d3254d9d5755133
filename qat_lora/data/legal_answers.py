"""A legal answer in five sections: written for training, read back from a model, and counted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from qat_lora.data.chat import Document, render_chat
from qat_lora.data.legal import WHO
from qat_lora.data.rates import rate
from qat_lora.data.sft import MONTHS, named, without_figures
from qat_lora.errors import UserError

SECTIONS = {
    "topic": "Topic", "difficulty": "Difficulty", "reasoning": "Reasoning", "answer": "Answer",
    "citation": "Case Citation",
}  # fmt: skip
NUMBERS = {name: number for number, name in enumerate(SECTIONS, 1)}
COLUMNS = {"topic": "topic", "difficulty": "difficulty", "reasoning": "reasoning", "answer": "answer",
           "citation": "case_citation"}  # fmt: skip
NEEDED = ("id", "question", *COLUMNS.values())
PARTY = re.compile(rf"\b(?:{'|'.join(WHO)})\b")
SYSTEM = "Answer in five sections: Topic, Difficulty, Reasoning, Answer, Case Citation."


# -- rows ------------------------------------------------------------------------------------------------------------
def checked_rows(rows: Sequence[dict]) -> list[dict]:
    """The rows, their ids and other columns as text without white space at the ends; an absent reasoning, topic,
    difficulty or citation is an empty one.

    Raises UserError for a column that is not there or holds something else than text, an empty id, question or answer,
    and ids that occur twice.
    """
    missing = [name for name in NEEDED if not any(name in row for row in rows)]
    if missing:
        raise UserError(
            f"the dataset has no column {', '.join(missing)}; needed: {', '.join(NEEDED)} (there: {', '.join(rows[0])})"
        )
    for name in NEEDED:
        known = (str, int) if name == "id" else str
        odd = [str(row.get("id")) for row in rows if row.get(name) is not None and not isinstance(row[name], known)]
        if odd:
            raise UserError(f"rows {named(odd)}: column {name} is not text; mend or remove them")
    clean = [row | {name: str(row[name] if row.get(name) is not None else "").strip() for name in NEEDED}
             for row in rows]  # fmt: skip
    broken = [row["id"] for row in clean if any(_surrogate(row[name]) for name in NEEDED)]
    if broken:
        raise UserError(f"rows {named(map(ascii, broken))}: the text is not Unicode; mend or remove them")
    for name in ("id", "question", "answer"):
        empty = [row["id"] or f"number {number}" for number, row in enumerate(clean) if not row[name]]
        if empty:
            raise UserError(f"rows {named(empty)}: column {name} is empty; mend or remove them")
    seen: set[str] = set()
    twice = [row["id"] for row in clean if row["id"] in seen or seen.add(row["id"])]
    if twice:
        raise UserError(f"rows {named(dict.fromkeys(twice))}: the id occurs twice; give each row one of its own")
    return clean


def _surrogate(text: str) -> bool:
    """Whether a text holds half of a surrogate pair, which JSON can spell and no tokenizer takes."""
    return any("\ud800" <= sign <= "\udfff" for sign in text)


def same(row: dict) -> str:
    """Equal for rows with the same question, however it is spaced and punctuated."""
    return " ".join(re.findall(r"\w+", row["question"].lower()))


def group(row: dict) -> str:
    """Equal for rows of one topic whose questions differ alone in their figures and in the trade of who is concerned,
    which is all that two questions of the generator in the same words differ in."""
    return f"{row['topic'].lower()}: {without_figures(PARTY.sub('a party', row['question'].lower()))}"


def messages(question: str) -> list[dict]:
    """What the model is asked, as chat messages."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def readable(row: dict) -> bool:
    """Whether the response reads back as its sections: no line of one begins as another does."""
    found = Answer.read(response(row), True)
    return found.formatted and all(found.sections[name] == row[column] for name, column in COLUMNS.items())


def _parts(row: dict) -> list[str]:
    breaks = {"reasoning": "\n"}
    return [f"{title}:{breaks.get(name, ' ')}{row[COLUMNS[name]]}".rstrip() for name, title in SECTIONS.items()]


def response(row: dict) -> str:
    """The answer that is to be learned: the five sections in order, each under its name, empty ones included."""
    return "\n".join(_parts(row))


def document(row: dict, tokenizer, thinks: bool = False) -> Document:
    """The row as the chat template renders it, with the answer's sections numbered as in NUMBERS; the opening of the
    answer counts to the first, its end to the last. Raises UserError that names the row's id."""
    said = response(row)
    markers = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    held = [marker for marker in markers if marker in said or marker in row["question"]]
    if held:
        raise UserError(f"row {row['id']}: its text holds {held[0]}, which the tokenizer takes for a sign; remove it")
    try:
        (rendered,) = render_chat([*messages(row["question"]), {"role": "assistant", "content": said}],
                                  tokenizer, "on" if thinks else "off")  # fmt: skip
    except UserError as error:
        raise UserError(f"row {row['id']}: {error}") from error
    ((start, end),) = rendered.spans
    at = rendered.text.find(said, start)
    if at < 0:
        raise UserError(f"row {row['id']}: the chat template changes the answer, so its sections cannot be told")
    edges = [start, *(at + place for place in _starts(row)[1:]), end]
    return Document(rendered.text, tuple(pairwise(edges)), tuple(NUMBERS.values()))


def _starts(row: dict) -> list[int]:
    """Where each section of a response begins: it is as long as the sections before it, and their line ends."""
    lengths = [len(part) for part in _parts(row)]
    return [sum(lengths[:number]) + number for number in range(len(lengths))]


# -- what an answer says ---------------------------------------------------------------------------------------------
FIGURE = re.compile(
    r"£ ?(?P<sum>\d[\d,]*(?:\.\d+)?)(?: ?(?P<size>thousand|k|million|m|billion|bn)\b)?"
    rf"|\b(?P<day>[0-3]?\d)(?:st|nd|rd|th)? (?:of )?(?P<month>{MONTHS}),? (?P<year>\d{{4}})\b"
    r"|\b(?P<count>\d+) (?P<unit>day|week|month|year)s?\b"
)
SIZES = {"thousand": 1e3, "k": 1e3, "million": 1e6, "m": 1e6, "billion": 1e9, "bn": 1e9, None: 1}
TITLE = re.compile(rf"^[ *#]*({'|'.join(SECTIONS.values())})[ *]*:\** *", re.MULTILINE)


def figure(text: str) -> str | None:
    """The first sum, date or time in a text, in one spelling."""
    found = FIGURE.search(text)
    return found and _plain(found)


def _plain(found: re.Match) -> str:
    if found["sum"]:
        return f"£{float(found['sum'].replace(',', '')) * SIZES[found['size']]:.2f}"
    if found["day"]:
        return f"{int(found['day'])} {found['month']} {found['year']}"
    return f"{int(found['count'])} {found['unit']}"


@dataclass(frozen=True)
class Answer:
    """What a model said, and whether it came to an end. sections: by name, one that is there twice as one text;
    in_order: every one is there once, in order, after nothing else."""

    text: str
    ended: bool
    sections: dict[str, str]
    in_order: bool

    @classmethod
    def read(cls, text: str, ended: bool) -> "Answer":
        found = list(TITLE.finditer(text))
        ends = [match.start() for match in found[1:]] + [len(text)]
        titles = {title: name for name, title in SECTIONS.items()}
        bodies: dict[str, str] = {}
        for match, end in zip(found, ends):
            name, body = titles[match[1]], text[match.end() : end].strip()
            bodies[name] = f"{bodies[name]}\n{body}" if name in bodies else body
        in_order = [match[1] for match in found] == list(SECTIONS.values()) and not text[: found[0].start()].strip()
        return cls(text, ended, bodies, in_order)

    @property
    def formatted(self) -> bool:
        """Five sections in order, with an answer, and an end."""
        return self.in_order and self.ended and bool(self.sections["answer"])

    def figure(self) -> str | None:
        """What the answer comes to: the figure of its section, or, of a text without one, the last figure."""
        if "answer" in self.sections:
            return figure(self.sections["answer"])
        found = list(FIGURE.finditer(self.text))
        return _plain(found[-1]) if found else None


# -- citations -------------------------------------------------------------------------------------------------------
PLACES = {"s": "sections?|sec|ss?", "reg": "regulations?|regs?", "art": "articles?|arts?", "r": "rules?|rr?",
          "para": "paragraphs?|paras?", "sch": "schedules?|sch"}  # fmt: skip
PLACE = rf"(?:{'|'.join(PLACES)}) \d[\w.()/–-]*"
REPORT = r"[\[(][12]\d{3}[\])](?: [\w&]+){0,5}"  # as in Froom v Butcher [1976] QB 286
NAME = r"(?:[A-Z]\w{0,2}\.|[A-Z][\w'’&-]*)"  # only what is short is abbreviated
JOINED = r"(?:,? (?:and|of|the|for|from|in|to|on|or|application|\([^)]*\)))*,? "
# what stands for an authority in running text: a statute with its year, or a case, with its report or without
LOOSE = re.compile(
    rf"{NAME}(?:{JOINED}{NAME})*? (?:Act|Regulations|Order|Rules)(?: \([^)]*\))? [12]\d{{3}}\b(?:, {PLACE})?"
    rf"|(?:R \([^)]*\)|{NAME}(?:{JOINED}{NAME})*) v\.? {NAME}(?: (?:{NAME}|and|of|the|for|&))*(?: {REPORT})?"
    rf"|\bRe {NAME}(?: {NAME})* {REPORT}"
)
OPENING = re.compile(r"^(?:(?:see|as|in|under|the|by|and|of|but|cf|pursuant|according|to) )+", re.IGNORECASE)
NOTHING = {"", "none", "n/a", "not applicable", "no authority"}
GAP = " § "  # stands where something was found, so that what is around it does not grow together


def citations(section: str) -> set[str]:
    """The entries of a citation section, which stand between semicolons or line ends."""
    entries = {_spelled(entry).strip(" .-•") for entry in re.split(r"[;\n]", section)}
    return {entry for entry in entries if entry.lower() not in NOTHING}


class Authorities:
    """A closed list of what may be cited, found in texts however it is spaced and its places are spelled: "Limitation
    Act 1980, s 5", "Limitation Act 1980 section 5" and "s. 5 of the Limitation Act 1980" are one.

    An authority is a title (an Act, Rules, a case) and, mostly, a place in it or a report.
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(dict.fromkeys(_spelled(name) for name in names if name.strip()))
        titles = {re.split(rf", (?={PLACE}$)| (?={REPORT})", name)[0] for name in self.names}
        self.known, self.elsewhere = (self._any(found) for found in (self.names, titles))

    @staticmethod
    def _any(names) -> str:
        """A pattern of any of the names, the longest first: s 11A before s 11."""
        return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or r"(?!)"

    def cited(self, answer: Answer) -> tuple[set[str], set[str]]:
        """(authorities of the list, others) that an answer cites: in its whole text what looks like a statute, a case
        or a place in a title of the list, and every other entry of its citation section. A title of the list without
        a place or report is neither."""
        known, others, _ = self._found(answer.text)
        for entry in citations(answer.sections.get("citation", "")):
            listed, unlisted, rest = self._found(entry)
            rest = re.sub(r"\([^)]*\)|\b(?:and|see|also|with|under|the|in)\b|[^\w]", "", rest)
            if rest:
                others |= {entry} if not listed else unlisted or {rest}
        return known, others - known

    def _found(self, text: str) -> tuple[set[str], set[str], str]:
        """What a text cites of the list and beside it, and what is left of the text."""
        known: set[str] = set()
        others: set[str] = set()

        def take(pattern: str | re.Pattern, into: set[str] | None, text: str) -> str:
            found = [match[0].strip(" .,") for match in re.finditer(pattern, text)]
            if into is not None:
                into.update(OPENING.sub("", name) if into is others else name for name in found)
            return re.sub(pattern, GAP, text)

        rest = _spelled(text.replace("\n", GAP))
        rest = re.sub(rf"(?<![\w-])({PLACE}) of (?:the )?({self.elsewhere})(?!\w|, {PLACE})", r"\2, \1", rest)
        rest = re.sub(rf"(?<![\w-])({self.elsewhere}) (?={PLACE})", r"\1, ", rest)
        rest = take(rf"(?<![\w-])(?:{self.known})(?![\w(/–-]|\.\d)", known, rest)
        rest = take(rf"(?<![\w-])(?:{self.elsewhere})(?:, {PLACE}| {REPORT})", others, rest)
        rest = take(rf"(?<![\w-])(?:{self.elsewhere})", None, rest)
        return known, others, take(LOOSE, others, rest)


def _spelled(text: str) -> str:
    """A text with one space between words, no marks of emphasis, and places in Acts spelled as in PLACES."""
    text = " ".join(re.sub("[*_]", "", text).split())
    for short, words in PLACES.items():
        text = re.sub(rf"(?<![\w'’])(?:{words})\.? ?(?=\d{{1,3}}(?!\d))", f"{short} ", text, flags=re.IGNORECASE)
    return re.sub(rf"(?<=\b\d{{4}}) (?={PLACE})", ", ", text)


def score(answers: Sequence[Answer], rows: Sequence[dict], authorities: Authorities) -> dict[str, dict]:
    """Rates with 95% intervals over answers to rows, without those of nothing (no row has a figure, say).

    format: five sections in order, ended. accuracy: of rows whose answer has a figure, the same figure. precision: of
    all that is cited, what is the row's own authority; recall: of the rows' authorities, what is cited. invented: of
    answers, those that cite something outside the list.
    """
    cited = [authorities.cited(answer) for answer in answers]
    wanted = [citations(row["case_citation"]) for row in rows]
    checkable = [(a, figure(row["answer"])) for a, row in zip(answers, rows) if figure(row["answer"])]
    hits = sum(len(known & own) for (known, _), own in zip(cited, wanted))
    rates = {
        "format": rate(sum(answer.formatted for answer in answers), len(answers)),
        "accuracy": rate(sum(answer.figure() == gold for answer, gold in checkable), len(checkable)),
        "citation_precision": rate(hits, sum(len(known) + len(others) for known, others in cited)),
        "citation_recall": rate(hits, sum(map(len, wanted))),
        "invented": rate(sum(bool(others) for _, others in cited), len(answers)),
    }
    return {name: found for name, found in rates.items() if found["count"]}
