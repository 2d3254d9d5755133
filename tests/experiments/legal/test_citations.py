"""Citations: all spellings of an authority have one key, and are found in any text in linear time."""

import copy
import random
import time
import unicodedata
from collections.abc import Callable, Iterable
from functools import partial

import pytest
from tokenizers import normalizers

from qat_lora.experiments.legal.answers import checked_rows, readable, response, same, score
from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.citations import citations
from qat_lora.experiments.legal.data import legal_data
from qat_lora.experiments.legal.rules import AUTHORITIES
from qat_lora.experiments.legal.sections import Answer

ROW = {"id": "a", "question": "q", "answer": "a", "topic": "t", "difficulty": "d", "reasoning": "r"}
LIST = Authorities(AUTHORITIES)


def read(text: str) -> Answer:
    return Answer.read(text, True)


# -- one authority ---------------------------------------------------------------------------------------------------
SPELLINGS = [
    ["Limitation Act 1980, s 5", "section 5 of the Limitation Act 1980", "LIMITATION ACT 1980 Section 5.",
     "s.5 Limitation Act 1980", "Section 5, Limitation Act, 1980", "Limitation\u00a0Act 1980 (s 5)",
     "*Limitation Act 1980*, s\u00a05", "Ｌｉｍｉｔａｔｉｏｎ Ａｃｔ １９８０，ｓ ５",
     "Limit\u00adation Act 1980, § 5"],
    ["Magistrates' Courts Act 1980, s 127", "Magistrates’ Courts Act 1980 section 127",
     "magistrates courts act 1980 s127"],
    ["Roe v. Wade, 410 U.S. 113 (1973)", "Roe v Wade (1973) 410 US 113", "ROE vs. WADE, 410 U. S. 113 (1973)"],
    ["Byrne & Co v Leon Van Tienhoven & Co (1880) 5 CPD 344",
     "Byrne and Co. v. Leon Van Tienhoven and Co. (1880) 5 CPD 344"],
    ["A v B [1976] QB 286", "A versus B (1976) QB 286", "A v. B [1976] Q.B. 286"],
    ["§ 823 BGB", "BGB, § 823", "Section 823 of the BGB"],
    ["Art. 5 GDPR", "GDPR, art 5", "Article 5 of the GDPR", "Articles 5 GDPR"],
    ["Art. 1240 du Code civil", "Code civil, art. 1240", "article 1240 Code Civil"],
    ["Artículo 14 de la Constitución Española", "Constitucio\u0301n Española, art. 14"],
    ["X Act 1990, Sch 2, para 3", "para 3 of Schedule 2 to the X Act 1990"],
    ["Data Order 2005, ss 5, 6 and 8", "sections 5, 6 and 8 of the Data Order 2005"],
    ["A.I.R. 1973 S.C. 1461", "AIR 1973 SC 1461"],
    ["Civil Procedure Rules 1998, r 54.5", "rule 54.5 of the Civil Procedure Rules 1998",
     "CIVIL PROCEDURE RULES 1998 r. 54.5", "Civil Procedure Rules, r 54.5", "CPR 54.5", "CPR r. 54.5", "CPR, rule 54.5",
     "rule 54.5 of the CPR"],
    ["Family Procedure Rules 2010, r 4.1(3)(a)", "FPR 4.1(3)(a)", "FPR 2010, r 4.1 (3)(a)"],
    ["CPR Part 36", "Part 36 of the Civil Procedure Rules 1998", "CPR Pt 36"],
    ["Limitation Act 1980, s 11", "Limitation Act 1980 (c. 58), s 11", "section 11 of the Limitation Act of 1980",
     "Limitation Act 1980 c. 58, section 11", "s 11 of the Limitation Act 1980 (c 58)"],
    ["Limitation Act 1980, s 14(1)", "subsection (1) of section 14 of the Limitation Act 1980",
     "Limitation Act 1980, s 14, subs (1)", "sub-s (1) of s 14 Limitation Act 1980",
     "section 14 subsection (1) of the Limitation Act 1980"],
    ["Limitation Act 1980, s 33(3)(b)", "para (b) of sub-section (3) of section 33 of the Limitation Act 1980",
     "Limitation Act 1980, s 33(3), paragraph (b)"],
    ["18 U.S.C. § 922(g)(1)", "18 U.S.C. 922(g)(1)", "18 USC § 922 (g)(1)", "18 U. S. C. 922(g)(1)"],
    ["29 C.F.R. § 1604.11", "29 CFR 1604.11"],
    ["Attorney General v Blake [2001] 1 AC 268", "Attorney-General v Blake [2001] 1 A.C. 268"],
    ["Carlill v Carbolic Smoke Ball Co [1893] 1 QB 256", "Carlill v. Carbolic Smoke Ball Company [1893] 1 QB 256"],
    ["R v Woollin [1999] 1 AC 82", "Regina v Woollin [1999] 1 AC 82"],
    ["R (Miller) v Minister [2017] UKSC 5", "R (on the application of Miller) v Minister [2017] UKSC 5"],
    ["United States v. Nixon, 418 U.S. 683 (1974)", "U.S. v. Nixon, 418 U.S. 683 (1974)"],
    ["U.S. Const. art. I, § 8", "U.S. Const. art. 1, § 8"],
    ["Human Rights Act 1998, Sch 1, art 8", "article VIII of Schedule I to the Human Rights Act 1998"],
    ["§ 823 Abs. 1 HGB", "§ 823 (1) HGB", "HGB, § 823 Absatz 1"], ["§§ 812 ff. ZPO", "ZPO, §§ 812 ff."],
    ["Art. 1241 et 1242 Code civil", "Code civil, art. 1241 et 1242"],
    ["Art. L. 1234-1 Code du travail", "article L1234-1 du Code du travail"],
    ["Case C-131/12 Google Spain", "Google Spain, C-131/12"],
    ["Regulation (EC) No 44/2001, art 5", "Regulation (EC) 44/2001, Article 5"],
    ["Limitation Act 1980, ss 2-4A", "Limitation Act 1980, ss 2 – 4A", "sections 2 to 4A of the Limitation Act 1980",
     "Limitation Act 1980, sections 2—4A"],
]  # fmt: skip


@pytest.mark.parametrize("spellings", SPELLINGS, ids=lambda spellings: spellings[0])
def test_all_spellings_of_an_authority_are_one_in_citation_sections_and_in_sentences(spellings):
    assert len({tuple(citations(spelling)) for spelling in spellings}) == 1
    listed, first = Authorities([*spellings, *spellings[1:2] * 3]), Authorities(spellings[:1])
    assert listed.names == (spellings[1],), "named by its most frequent spelling"
    for spelling in spellings:
        assert listed.cited(read(f"Answer: yes\nCase Citation: {spelling}")) == ({spellings[1]}, set())
        said = read(f"Reasoning: The court applied {spelling} to this.\nAnswer: yes")
        assert first.cited(said) == ({spellings[0]}, set())


def test_places_cited_together_equal_places_cited_separately():
    together, apart = "Limitation Act 1980, ss 5 and 6", ["Limitation Act 1980, s 5", "Limitation Act 1980, s 6"]
    said = [read(f"Case Citation: {text}") for text in (together, "; ".join(apart))]
    for names in ([together], [together, *apart]):
        assert [Authorities(names).cited(answer) for answer in said] == [({together}, set())] * 2
    assert [Authorities(apart).cited(answer) for answer in said] == [(set(apart), set())] * 2
    assert Authorities([together]).cited(read(f"Case Citation: {apart[0]}")) == ({together}, set())
    assert Authorities([together]).cited(read("Case Citation: Limitation Act 1980, s 7"))[1]


@pytest.mark.parametrize("name", [
    "In re Gault, 387 U.S. 1 (1967)", "Re B (A Child) [2013] UKSC 33", "Re B [2013] UKSC 33",
    "Brown v. Bd. of Educ., 347 U.S. 483 (1954)", "Marbury v. Madison, 5 U.S. (1 Cranch) 137 (1803)",
])  # fmt: skip
def test_cases_outside_the_list_are_found_in_prose(name):
    _, others = Authorities([]).found(read(f"Reasoning: The court held in {name} that it is so."))
    assert list(others) == list(citations(name)) and all(found in name for found in others.values())


def test_different_authorities_have_different_keys():
    assert len(citations("\n".join(spellings[0] for spellings in SPELLINGS))) == len(SPELLINGS)
    apart = ["X Act 1980, s 5", "X Act 1981, s 5", "X Act 1980, s 5A", "X Act 1980, s 5.2", "X Act 1980, s 5-9",
             "X Act 1980", "X Act 1980, s 5/6", "X Act 1980, reg 5", "X Rules 1980, r 5", "A v B", "B v A",
             "A v B [1976] QB 286", "A v B [1976] QB 287", "Art. 5 GDPR",
             "Art. 6 GDPR", "R v Smith", "§ 5 BGB", "§ 5 HGB"]  # fmt: skip
    assert len(citations("; ".join(apart))) == len(apart)


def test_a_case_without_its_year_or_report_matches_the_only_candidate():
    roe, froom = "Roe v. Wade, 410 U.S. 113 (1973)", "Froom v Butcher [1976] QB 286"
    for text in ("Case Citation: Roe v Wade, 410 US 113", "Reasoning: As Roe v. Wade, 410 U.S. 113, has it.\n"):
        assert Authorities([roe]).cited(read(text)) == ({roe}, set())
    one = Authorities([froom, "Froom v Butcher"])
    two = Authorities(["A v B [1976] QB 286", "A v B [1999] AC 1", "A v B"])
    assert one.names == (froom,) and len(two.names) == 3
    said = read("Case Citation: Froom v. Butcher")
    assert one.cited(said) == LIST.cited(said) == ({froom}, set())
    assert two.cited(read("Case Citation: A v B")) == ({"A v B"}, set())


@pytest.mark.parametrize("section, entries", [
    ("A v B; *C*  v D\n- E v F.", ["A v B", "C v D", "E v F"]),
    ("X Act 1999 Section 5, Y Act 2000, ss. 6", ["X Act 1999 Section 5", "Y Act 2000, ss. 6"]),
    ("Art. 5 GDPR and Art. 6 GDPR", ["Art. 5 GDPR", "Art. 6 GDPR"]),
    ("R v Smith and R v Jones", ["R v Smith", "R v Jones"]),
    ("410 U.S. 113；Roe v. Wade, 410 U.S. 113 (1973).", ["410 U.S. 113", "Roe v. Wade, 410 U.S. 113 (1973)"]),
    ("(1973) 4 SCC 225\u2028[1990] 1 AC 2", ["(1973) 4 SCC 225", "[1990] 1 AC 2"]), ("None; N/A\n—\n???", []),
    ("Smith v Jones Ltd.; 42 U.S.C.", ["Smith v Jones Ltd.", "42 U.S.C."]),
    ("Smith and Jones v Brown and Green", ["Smith and Jones v Brown and Green"]),
    ("Trade (Names, Marks and Signs) Act 1999, s 5", ["Trade (Names, Marks and Signs) Act 1999, s 5"]),
])  # fmt: skip
def test_a_citation_section_is_split_into_citations(section, entries):
    assert list(citations(section).values()) == entries
    assert [key for entry in entries for key in citations(entry)] == list(citations(section))


# -- a dataset's own answers -----------------------------------------------------------------------------------------
def rates(answers: Iterable[Answer], rows: list[dict], listed: Authorities) -> list[float]:
    """Precision, recall and share of invented citations."""
    found, best = score(list(answers), rows, listed), {"citation_precision": 1, "citation_recall": 1, "invented": 0}
    return [found.get(name, {"rate": alone})["rate"] for name, alone in best.items()]


def rated(rows: list[dict], form: str | None = None) -> list[float]:
    """The rates of a dataset's own answers, in a Unicode form."""
    listed = Authorities(sorted(Authorities(row["case_citation"] for row in rows).names))
    answers = [read(unicodedata.normalize(form, response(row)) if form else response(row)) for row in rows]
    for answer, row in zip(answers, rows):
        if readable(row):
            assert not listed.in_section(answer.sections["citation"])[1], row["case_citation"]
    return rates(answers, rows, listed)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_unicode_normalisation_does_not_change_the_scores(form):
    texts = ("Müller v Ångström [2001] AC 1", "artículo 5 de la Constitución Española", "Règlement №\u00a05 ﬁnal…")
    for other in ("NFC", "NFD"):
        rows = [ROW | {"case_citation": unicodedata.normalize(other, text)} for text in texts]
        assert rated(rows, form) == [1, 1, 0]


def test_citations_in_a_row_outside_its_citation_column_are_not_invented():
    row = ROW | {"reasoning": "As in Smith v Jones, and by the Theft Act 1968.", "case_citation": "A v B"}
    other = ROW | {"case_citation": "C v D", "reasoning": "A v B is no help."}
    assert rated([row, other]) == [1, 1, 0]
    said = read(response(ROW | {"case_citation": "C v D; Brown v Green"}))
    assert score([said], [other], Authorities(["A v B", "C v D"]))["invented"]["rate"] == 1


SCRAPS = """
Limitation Act 1980 2006 s S. ss section Sections § §§ art. Article Art r reg rule Rules Regulations Order para Part of
the and & , ; ( ) [ ] [1976] (1973) 5 5A 5(1) 5(1)(a) 54.5 5-9 5/6 v v. vs V versus Re In R Smith Jones O’Brien Co.
Ltd U.S. U. 410 QB SC BGB GDPR UK du Code civil Constitución Müller Straße see एआईआर उच्चतम 最高裁 – — ﬁ ½ ² 👍 ⚖️ * _ **
# None n/a none. Topic: Answer: under ... ! ? : " “ ” ' ｓ ５ （１） Ａｃｔ １９８０ İ I II XIV ´ 1. - ,, ))
"""
PIECES = [*SCRAPS.split(), "\u200b", "\u00ad", "\ufeff", "\u00a0", "  ", "\n", "\u2028", "\r\n"]


def odd(rng: random.Random) -> str:
    """A random citation column."""
    count = rng.choice((1, 2, 3, 5, 8, 14))
    return "".join(rng.choice(PIECES) + rng.choice((" ", " ", "", ", ")) for _ in range(count)).strip()


@pytest.mark.parametrize("form", [None, "NFC", "NFD", "NFKC", "NFKD"])
def test_a_dataset_of_odd_citations_gets_full_scores_against_its_own_list(form):
    rng = random.Random(str(form))
    for _ in range(25):
        assert rated([ROW | {"case_citation": odd(rng)} for _ in range(6)], form) == [1, 1, 0]


# -- rows of the fine-tune -------------------------------------------------------------------------------------------
WORDS = ("café", "señor", "Müller", "façade", "naïve", "Ångström", "Zürich", "rôle")


def made(rows, tokenizer):
    return legal_data(checked_rows(rows), tokenizer, 512, (1.0,) * 5, 0.3, 2, 0)


def row(number: int, word: str, citation: str, form: str) -> dict:
    columns = {"question": f"Is the {word} liable for {word}?", "answer": f"Yes, as {word}.", "topic": word,
               "difficulty": "easy", "reasoning": f"Step 1: {word}.", "case_citation": citation}  # fmt: skip
    return {"id": str(number)} | {name: unicodedata.normalize(form, text) for name, text in columns.items()}


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
    said = [unicodedata.normalize(kind or "NFD", response(one)) for one in data.questions]
    assert rates(map(read, said), data.questions, Authorities(data.authorities)) == [1, 1, 0]


def test_two_spellings_count_as_one_authority(tiny_tokenizer):
    rows = [row(at, f"Baker{'x' * at}", "section 5 of the Limitation Act 1980", "NFC") for at in range(63)]
    rows.append(row(63, "nurse", "Limitation Act 1980, s 5", "NFC"))
    data = made(rows, tiny_tokenizer)
    assert data.authorities == ["section 5 of the Limitation Act 1980"]
    assert rates(map(read, map(response, rows)), rows, Authorities(data.authorities)) == [1, 1, 0]


# -- time ------------------------------------------------------------------------------------------------------------
ADVERSARIAL = [
    "s 1 of ", "Schedule 1 to ", "\u0301\u0316", "para (a) of ", ", s 1 Limitation Act 1980", "5 U.S. (1 ", "Re A (b ",
    "A ", "A", "Re ", "v ", "section ", "(", "§ ", " ", "\n", ",", "1", "A v ", "s 5 of the ", "A. ", "A & ", "(A) ",
    "Act 1980 ", "Limitation the ", "ss 5, ", "s 5(1)", "[1976] ", "£1,", "a\u0301", "Case Citation: A;", "Topic:\n",
    "Froom v Butcher ",
]  # fmt: skip


def linear(small: Callable[[], object], large: Callable[[], object]) -> bool:
    """Whether `large`, with four times the work of `small`, takes less than nine times as long in one of five attempts:
    quadratic code takes 16 times as long in each of them, and a busy machine disturbs only some."""

    def seconds(work) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return any(seconds(large) < 9 * seconds(small) + 0.2 for _ in range(5))


@pytest.mark.parametrize("wrapped", ["{}", "Case Citation: {}"])
def test_reading_takes_linear_time(wrapped):
    def work(piece: str, length: int) -> None:
        answer = read(wrapped.format((piece * length)[:length]))
        LIST.cited(answer)
        answer.figure()

    for piece in ADVERSARIAL:
        assert linear(partial(work, piece, 2_000), partial(work, piece, 8_000)), piece


def test_many_places_of_one_title_take_linear_time():
    def work(count: int) -> None:
        for text in ("s 1, " * count + "Limitation Act 1980", "Zog Act 1980" + ", s 1" * count):
            LIST.cited(read(text))

    assert linear(partial(work, 2_500), partial(work, 10_000))


def test_reading_time_does_not_grow_with_the_list():
    names = [f"P{number:x} v D{number:x} [1990] {number} QB 1" for number in range(1000)]
    said = read("".join(f"See {name}, and no other. " for name in names[:40] * 5))
    short, long = Authorities(names[:40]), Authorities(names)
    assert short.cited(said) == long.cited(said) == (set(names[:40]), set())
    assert linear(partial(short.cited, said), partial(long.cited, said))
