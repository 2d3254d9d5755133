"""The five sections of a legal answer, read back from a model's output."""

import re
from dataclasses import dataclass

from qat_lora.data.appearance import BLANKS, visible
from qat_lora.experiments.legal.figures import figure, figures

SECTIONS = {
    "topic": "Topic",
    "difficulty": "Difficulty",
    "reasoning": "Reasoning",
    "answer": "Answer",
    "citation": "Case Citation",
}
NUMBERS = {name: number for number, name in enumerate(SECTIONS, 1)}
# Invisible characters may surround a title, and the colon may be a full-width one.
TITLE = re.compile(rf"^[{BLANKS}*#]*+({'|'.join(SECTIONS.values())})[{BLANKS}*]*+[:：]\** *", re.MULTILINE)


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
        return next(reversed(figures(self.text)), None)
