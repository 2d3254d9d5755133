"""Authorities: several reports of a case are one, lists are their places, inventions are seen in prose."""
# ruff: noqa: E501

from collections import Counter

import pytest
from authority_table import KINDS, gold, measure

from qat_lora.experiments.legal.answers import score
from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.sections import Answer

STACK = "Stack v Dowden [2007] UKHL 17, [2007] 2 AC 432"


def rates(gold_citation: str, cited: str, prose: str = "", listed: list[str] | None = None) -> list[float]:
    """Precision, recall and share of invented citations of one answer."""
    row = {"id": "a", "question": "q", "answer": "a", "topic": "t", "difficulty": "d", "reasoning": "r",
           "case_citation": gold_citation}  # fmt: skip
    said = Answer.read(f"Reasoning: {prose}\nAnswer: a\nCase Citation: {cited}", True)
    found = score([said], [row], Authorities(listed or [gold_citation]))
    return [found[name]["rate"] for name in ("citation_precision", "citation_recall", "invented")]


def test_spellings_made_without_the_parser_are_recognised_and_inventions_are_seen():
    found, (seen, fakes), missed, unseen = measure()
    first = [spellings[0] for make in KINDS.values() for spellings in make()]
    assert len(first) == len(Authorities(first).names) == fakes == 120, "different authorities have different keys"
    right, count = map(sum, zip(*found.values()))
    assert right >= 0.99 * count, missed
    assert seen >= 0.95 * fakes, unseen
    assert len(set(gold())) == 1


@pytest.mark.parametrize("cited", [
    "Stack v Dowden [2007] UKHL 17", "Stack v Dowden [2007] 2 AC 432", "[2007] 2 AC 432", "Stack v Dowden",
    "Stack v Dowden [2007] UKHL 17 at [120]", "Stack v Dowden [2007] 2 AC 432, 580 (HL)",
    "Stack v Dowden [2007] UKHL 17; [2007] 2 AC 432", "Stack v Dowden [2007] 2 A.C. 432, per Lady Hale at [12]-[14]",
])  # fmt: skip
def test_a_case_with_two_reports_is_one_authority(cited):
    assert rates(STACK, cited) == [1, 1, 0]
    assert rates(STACK, cited, f"As {cited} says.") == [1, 1, 0]


@pytest.mark.parametrize("cited", [
    "Stack v Dowden [2007] 2 AC 433", "Stack v Dowden [2007] UKHL 17, [2007] 2 AC 433", "Jones v Kernott [2007] UKHL 17",
    "Stack v Dowden [2011] UKSC 53", "Stack v Dowden [2007] UKHL 17, [2011] UKSC 53", "Stack v Dowden [2008] UKHL 17",
])  # fmt: skip
def test_a_wrong_report_or_a_wrong_pairing_is_invented(cited):
    listed = [STACK, "Jones v Kernott [2011] UKSC 53"]
    assert rates(STACK, cited, listed=listed) == [0, 0, 1]
    assert rates(STACK, STACK, f"As {cited} says.", listed)[2] == 1


def test_the_number_of_another_instrument_is_invented():
    listed = ["Zog Regulations 1998 (SI 1998/1833), reg 4", "Yak Regulations 1999 (SI 1999/5), reg 4"]
    assert rates(listed[0], "Zog Regulations 1998 (SI 1999/5), reg 4", listed=listed)[2] == 1
    assert rates("Zog Regulations 1998, reg 4", listed[0]) == [1, 1, 0], "the list does not know its number"


@pytest.mark.parametrize("places, single", [
    ("s 2(1)-(3)", "s 2(1); s 2(2); s 2(3)"), ("s 53(1)(b) and (c)", "s 53(1)(b); s 53(1)(c)"),
    ("ss 2(1) and 2(3)", "s 2(1); s 2(3)"), ("s 2(1) and (3)", "s 2(1); s 2(3)"), ("ss 5-8", "s 5; s 6; s 7; s 8"),
    ("s 1(a)-(c)", "s 1(a); s 1(b); s 1(c)"), ("s 3(2)(i) to (iii)", "s 3(2)(i); s 3(2)(ii); s 3(2)(iii)"),
    ("s 7(1)(a), (b) and (2)", "s 7(1)(a); s 7(1)(b); s 7(2)"),
])  # fmt: skip
def test_lists_and_ranges_are_their_places(places, single):
    whole = f"Zog Act 1999, {places}"
    apart = "; ".join(f"Zog Act 1999, {place}" for place in single.split("; "))
    assert rates(whole, whole, f"By {whole}, or {places} of the Zog Act 1999, yes.") == [1, 1, 0]
    assert rates(whole, apart) == rates(apart, whole) == [1, 1, 0]


@pytest.mark.parametrize("text", [
    "[2015] UKSC 11", "the Zog Act", "Zog (Fees) Regulations", "SI 2014/123", "S.I. 2014 No. 123", "Regulation (EU) 2019/1150",
    "Council Directive 85/374/EEC", "Regulation (EC) No 261/2004", "Framework Decision 2002/584/JHA", "Case T-201/04",
    "42 U.S.C. § 1985", "29 CFR 1910.5", "410 U.S. 114", "22 Cal. 4th 100", "(2005) 83 Cr App R 751", "Article 101 TFEU",
    "Article 8 of the European Convention on Human Rights", "section 5 of the Zog Act", "Cal. Civ. Code § 1714",
    "Pub. L. No. 111-148", "Application no 12345/67", "In re Gault", "U.S. Const. amend. XIV",
])  # fmt: skip
def test_what_looks_like_an_authority_counts_in_prose(text):
    said = Answer.read(f"Reasoning: The judge followed {text} here.\nAnswer: a", True)
    assert Counter(map(len, Authorities([STACK]).cited(said))) == Counter([0, 1])


@pytest.mark.parametrize("text", [
    "Time runs from 3 May 2021. Section 5 applies, 12 weeks later.", "An Act of Parliament. The Rules say so.",
    "Part 3 of the claim, and Order 5 pizzas.", "On 12 Mar 2020 the US and the UK agreed.", "The Act of God defence.",
])  # fmt: skip
def test_ordinary_words_are_no_authorities(text):
    assert Authorities([STACK]).cited(Answer.read(f"Reasoning: {text}\nAnswer: a", True)) == (set(), set())
