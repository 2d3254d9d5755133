"""A legal answer in five sections: rendered for training, read back from a model, and scored."""

import re
import unicodedata
from collections.abc import Sequence
from itertools import accumulate, pairwise

from qat_lora.data.appearance import WORD, folded, visible
from qat_lora.data.chat import Document, render_chat
from qat_lora.data.supervised import named, without_figures
from qat_lora.data.text import nfc
from qat_lora.errors import UserError
from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.figures import figure
from qat_lora.experiments.legal.rules import WHO
from qat_lora.experiments.legal.sections import NUMBERS, SECTIONS, Answer
from qat_lora.train.intervals import rate

COLUMNS = {"topic": "topic", "difficulty": "difficulty", "reasoning": "reasoning", "answer": "answer",
           "citation": "case_citation"}  # fmt: skip
NEEDED = ("id", "question", *COLUMNS.values())
PUNCTUATION = {"Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sk"}
PARTY = re.compile(rf"\b(?:{'|'.join(WHO)})\b")
SYSTEM = "Answer in five sections: Topic, Difficulty, Reasoning, Answer, Case Citation."


# -- rows ------------------------------------------------------------------------------------------------------------
def checked_rows(rows: Sequence[dict]) -> list[dict]:
    """The rows, with ids and other columns as stripped text; an absent reasoning, topic, difficulty or citation becomes
    empty.

    Raises UserError for a column that is missing or holds something other than text, for an id, question or answer that
    is empty or shows nothing (e.g. zero-width characters), and for ids that occur twice.
    """
    missing = [name for name in NEEDED if not any(name in row for row in rows)]
    if missing:
        raise UserError(
            f"the dataset has no column {', '.join(missing)}; needed: {', '.join(NEEDED)} (found: {', '.join(rows[0])})"
        )
    for name in NEEDED:
        known = (str, int) if name == "id" else str
        odd = [str(row.get("id")) for row in rows if row.get(name) is not None and not isinstance(row[name], known)]
        if odd:
            raise UserError(f"rows {named(odd)}: column {name} is not text; fix or remove them")
    clean = [
        row | {name: str(row[name] if row.get(name) is not None else "").strip() for name in NEEDED} for row in rows
    ]
    # half of a surrogate pair, which JSON can express but no tokenizer accepts
    broken = [row["id"] for row in clean if any("\ud800" <= sign <= "\udfff" for n in NEEDED for sign in row[n])]
    if broken:
        raise UserError(f"rows {named(map(ascii, broken))}: the text is not Unicode; fix or remove them")
    for name in ("id", "question", "answer"):
        empty = [
            row["id"] if visible(row["id"]) else f"number {number}"
            for number, row in enumerate(clean)
            if not visible(row[name])
        ]
        if empty:
            raise UserError(f"rows {named(empty)}: column {name} is empty; fix or remove them")
    seen: set[str] = set()
    twice = [row["id"] for row in clean if row["id"] in seen or seen.add(row["id"])]
    if twice:
        raise UserError(f"rows {named(dict.fromkeys(twice))}: the id occurs twice; give each row a unique id")
    return clean


def same(row: dict) -> str:
    """A key that is equal for rows whose questions differ only in spacing, punctuation and encoding."""
    question = folded(row["question"])
    words = re.findall(rf"{WORD}+|\S", question.replace("_", " "))
    return " ".join(word for word in words if unicodedata.category(word[0]) not in PUNCTUATION) or question


def group(row: dict) -> str:
    """A key that is equal for rows of one topic whose questions differ only in figures and in the trade of the person
    concerned, which is all that differs between questions from one template of the generator."""
    return f"{folded(row['topic'])}: {without_figures(PARTY.sub('a party', folded(row['question'])))}"


def messages(question: str) -> list[dict]:
    """The question as chat messages, with the system prompt."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": nfc(question)}]


def readable(row: dict) -> bool:
    """Whether reading the response back gives the same sections, i.e. no line in them begins like a section's title."""
    found = Answer.read(response(row), True)
    return found.formatted and all(found.sections[name] == row[column] for name, column in COLUMNS.items())


def _parts(row: dict) -> list[str]:
    breaks = {"reasoning": "\n"}
    return [f"{title}:{breaks.get(name, ' ')}{row[COLUMNS[name]]}".rstrip() for name, title in SECTIONS.items()]


def response(row: dict) -> str:
    """The answer to train on: the five sections in order, each with its title, empty ones included."""
    return "\n".join(_parts(row))


def document(row: dict, tokenizer, thinks: bool = False) -> Document:
    """The row as the chat template renders it, with the answer's sections numbered as in NUMBERS. The opening of the
    answer belongs to the first section, its end to the last. Raises UserError that names the row's id."""
    said = response(row)
    markers = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    held = [marker for marker in markers if marker in said or marker in row["question"]]
    if held:
        raise UserError(
            f"row {row['id']}: its text holds {held[0]}, which the tokenizer reads as a special token; remove it"
        )
    try:
        (rendered,) = render_chat(
            [*messages(row["question"]), {"role": "assistant", "content": said}], tokenizer, "on" if thinks else "off"
        )
    except UserError as error:
        raise UserError(f"row {row['id']}: {error}") from error
    ((start, end),) = rendered.spans
    at = rendered.text.find(said, start)
    if at < 0:
        raise UserError(f"row {row['id']}: the chat template changes the answer; use another one with --chat-template")
    inner = accumulate(len(part) + 1 for part in _parts(row)[:-1])  # a section begins after the line end before it
    edges = [start, *(at + place for place in inner), end]
    return Document(rendered.text, tuple(pairwise(edges)), tuple(NUMBERS.values()), rendered.prompt)


# -- scoring -----------------------------------------------------------------------------------------------------------
def score(answers: Sequence[Answer], rows: Sequence[dict], authorities: Authorities) -> dict[str, dict]:
    """Rates with 95% intervals over answers to rows; a rate over nothing (e.g. no row has a figure) is left out.

    format: share of answers with five sections in order and an end. accuracy: among rows with a figure, share of
    answers with the same figure; its "without_figure" is the number of rows that have none. citation_precision: share
    of cited authorities that the row's own response cites, too. citation_recall: share of authorities in the rows'
    citation columns that the answers cite. invented: share of answers that cite something found neither in the list nor
    in their row. The rows' own responses therefore always score 1, 1 and 0 in the last three.
    """
    checkable = [(a, figure(row["answer"])) for a, row in zip(answers, rows) if figure(row["answer"])]
    cited = wanted = right = recalled = 0
    for answer, row in zip(answers, rows):
        gold = Answer.read(response(row), True)
        allowed = authorities.with_answer(gold)
        said, best = (_keys(authorities.found(text, allowed)) for text in (answer, gold))
        columns = _keys(authorities.in_section(gold.sections.get("citation", ""), allowed))
        cited, wanted = cited + len(said), wanted + len(columns)
        right, recalled = right + len(said & best), recalled + len(said & columns)
    rates = {
        "format": rate(sum(answer.formatted for answer in answers), len(answers)),
        "accuracy": rate(sum(answer.figure() == gold for answer, gold in checkable), len(checkable))
        | {"without_figure": len(rows) - len(checkable)},
        "citation_precision": rate(right, cited),
        "citation_recall": rate(recalled, wanted),
        "invented": rate(sum(bool(invented(a, row, authorities)) for a, row in zip(answers, rows)), len(answers)),
    }
    return {name: found for name, found in rates.items() if found["count"]}


def invented(answer: Answer, row: dict, authorities: Authorities) -> list[str]:
    """The authorities that an answer to a row cites and that are neither in the list nor in the row, sorted."""
    _, others = authorities.found(answer, authorities.with_answer(Answer.read(response(row), True)))
    return sorted(set(others.values()))


def _keys(found: tuple[dict[str, str], dict[str, str]]) -> set[str]:
    known, others = found
    return known.keys() | others.keys()
