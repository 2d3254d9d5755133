"""Rows of the legal fine-tune: two Unicode forms of one text, two spellings of one authority."""

import copy
from collections.abc import Iterable
from unicodedata import normalize

import pytest
from tokenizers import normalizers

from qat_lora.experiments.legal.answers import checked_rows, response, same, score
from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.data import legal_data
from qat_lora.experiments.legal.sections import Answer

WORDS = ("café", "señor", "Müller", "façade", "naïve", "Ångström", "Zürich", "rôle")


def rated(said: Iterable[str], rows: list[dict], data) -> list[float]:
    """Precision, recall and share of invented citations."""
    rates = score([Answer.read(text, True) for text in said], rows, Authorities(data.authorities))
    return [rates[name]["rate"] for name in ("citation_precision", "citation_recall", "invented")]


def made(rows, tokenizer):
    return legal_data(checked_rows(rows), tokenizer, 512, (1.0,) * 5, 0.3, 2, 0)


def row(number: int, word: str, citation: str, form: str) -> dict:
    columns = {"question": f"Is the {word} liable for {word}?", "answer": f"Yes, as {word}.", "topic": word,
               "difficulty": "easy", "reasoning": f"Step 1: {word}.", "case_citation": citation}  # fmt: skip
    return {"id": str(number)} | {name: normalize(form, text) for name, text in columns.items()}


@pytest.mark.parametrize("kind", [None, "NFC", "NFD", "NFKC"])
def test_two_unicode_forms_count_as_one_text(tiny_tokenizer, kind):
    """Whichever form the tokenizer decodes to."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    if kind:
        tokenizer.backend_tokenizer.normalizer = getattr(normalizers, kind)()
    rows = [
        row(2 * at + (form == "NFD"), word, f"{word} v Peña [2001] AC {at}", form)
        for at, word in enumerate(WORDS)
        for form in ("NFD", "NFC")
    ]
    data = made(rows, tokenizer)
    assert len(data.left_out["the same question as an earlier row"]) == len(WORDS)
    assert data.examples + len(data.questions) == len(data.authorities) == len(WORDS)
    assert len({same(one) for one in data.questions}) == len(data.questions)
    said = [normalize(kind or "NFD", response(one)) for one in data.questions]
    assert rated(said, data.questions, data) == [1, 1, 0]


def test_two_spellings_count_as_one_authority(tiny_tokenizer):
    rows = [row(at, f"Baker{'x' * at}", "section 5 of the Limitation Act 1980", "NFC") for at in range(63)]
    rows.append(row(63, "nurse", "Limitation Act 1980, s 5", "NFC"))
    data = made(rows, tiny_tokenizer)
    assert data.authorities == ["section 5 of the Limitation Act 1980"]
    assert rated(map(response, rows), rows, data) == [1, 1, 0]
