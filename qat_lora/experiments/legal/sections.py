"""The five sections of a legal answer, read back from a model's output."""

import re
from dataclasses import dataclass

from qat_lora.data.appearance import BLANKS, plain, visible
from qat_lora.data.supervised import MONTHS

SECTIONS = {
    "topic": "Topic",
    "difficulty": "Difficulty",
    "reasoning": "Reasoning",
    "answer": "Answer",
    "citation": "Case Citation",
}
NUMBERS = {name: number for number, name in enumerate(SECTIONS, 1)}
FIGURE = re.compile(
    r"£ ?(?P<sum>\d[\d,]*+(?:\.\d++)?)(?: ?(?P<size>thousand|k|million|m|billion|bn)\b)?"
    rf"|\b(?P<day>[0-3]?\d)(?:st|nd|rd|th)? (?:of )?(?P<month>{MONTHS}),? (?P<year>\d{{4}})\b"
    r"|\b(?P<count>\d{1,9}) (?P<unit>day|week|month|year)s?\b"
)
SIZES = {"thousand": 1e3, "k": 1e3, "million": 1e6, "m": 1e6, "billion": 1e9, "bn": 1e9, None: 1}
# Invisible characters may surround a title, and the colon may be a full-width one.
TITLE = re.compile(rf"^[{BLANKS}*#]*+({'|'.join(SECTIONS.values())})[{BLANKS}*]*+[:：]\** *", re.MULTILINE)


def figure(text: str) -> str | None:
    """The first sum, date or period in a text, in one canonical spelling; None if there is none."""
    found = FIGURE.search(plain(text))
    return found and _plain(found)


def _plain(found: re.Match) -> str:
    if found["sum"]:
        return f"£{float(found['sum'].replace(',', '')) * SIZES[found['size']]:.2f}"
    if found["day"]:
        return f"{int(found['day'])} {found['month']} {found['year']}"
    return f"{int(found['count'])} {found['unit']}"


@dataclass(frozen=True)
class Answer:
    """A model's answer, and whether the model ended it. sections: text by name, with repeated sections joined;
    in_order: every section occurs once, in order, with nothing visible before them; prose: everything except the
    citation section."""

    text: str
    ended: bool
    sections: dict[str, str]
    in_order: bool
    prose: str

    @classmethod
    def read(cls, text: str, ended: bool) -> "Answer":
        """Read the sections of a text. ended: whether the model ended it, rather than a length limit."""
        found = list(TITLE.finditer(text))
        ends = [match.start() for match in found[1:]] + [len(text)]
        names = {title: name for name, title in SECTIONS.items()}
        before = text[: found[0].start()] if found else text
        bodies: dict[str, list[str]] = {}
        prose = [before]
        for match, end in zip(found, ends):
            name, body = names[match[1]], text[match.end() : end].strip()
            bodies.setdefault(name, []).append(body)
            if name != "citation":
                prose.append(body)
        in_order = [match[1] for match in found] == list(SECTIONS.values()) and not visible(before)
        return cls(text, ended, {name: "\n".join(parts) for name, parts in bodies.items()}, in_order, "\n".join(prose))

    @property
    def formatted(self) -> bool:
        """Whether the answer has five sections in order, a visible answer section, and an end."""
        return self.in_order and self.ended and visible(self.sections["answer"])

    def figure(self) -> str | None:
        """The figure of the answer section or, if there is no such section, the last figure of the text; None if there
        is none."""
        if "answer" in self.sections:
            return figure(self.sections["answer"])
        found = list(FIGURE.finditer(plain(self.text)))
        return _plain(found[-1]) if found else None
