"""Legal answers: rendered in sections, read back, and scored against values computed by hand."""

import pytest

from qat_lora.data.supervised import encoded
from qat_lora.errors import UserError
from qat_lora.experiments.legal.answers import SYSTEM, checked_rows, document, group, readable, response, same, score
from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.rules import AUTHORITIES, generate
from qat_lora.experiments.legal.sections import NUMBERS, Answer, figure

ROW = {
    "id": "a", "question": "Until when?", "answer": "The last day: 3 May 2027.", "topic": "contract",
    "difficulty": "easy", "case_citation": "Limitation Act 1980, s 5", "reasoning": "Step 1: One.\nStep 2: Two.",
}  # fmt: skip
SAID = (
    "Topic: contract\nDifficulty: easy\nReasoning:\nStep 1: One.\nStep 2: Two.\nAnswer: The last day: 3 May 2027.\n"
    "Case Citation: Limitation Act 1980, s 5"
)
LIST = Authorities(AUTHORITIES)


def changed(**columns) -> dict:
    return ROW | columns


# -- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rows, words",
    [
        ([{k: v for k, v in ROW.items() if k != "reasoning"}], "the dataset has no column reasoning; needed: id, "),
        ([ROW, changed(id="b", answer=" "), changed(id="c", answer=None)], "rows b, c: column answer is empty"),
        ([changed(question="")], "rows a: column question is empty"),
        ([ROW, changed(id="")], "rows number 1: column id is empty"),
        ([ROW, changed(id="b", reasoning=["One."])], "rows b: column reasoning is not text"),
        ([ROW, changed(case_citation=float("nan"))], "rows a: column case_citation is not text"),
        ([ROW, changed(question="And when?")], "rows a: the id occurs twice"),
        ([changed(id=str(n), answer="") for n in range(7)], "rows 0, 1, 2, 3, 4 and 2 more: column answer"),
    ],
)
def test_bad_rows_are_refused(rows, words):
    with pytest.raises(UserError, match=words):
        checked_rows(rows)


def test_other_columns_may_be_empty_and_ids_may_be_numbers():
    (row,) = checked_rows([changed(id=7, reasoning=None, case_citation="  ")])
    assert row["id"] == "7" and row["reasoning"] == row["case_citation"] == ""


@pytest.mark.parametrize("text", ["\u200b", "\u00ad\ufeff", "\u00a0", "\ufe0f", "\x00"])
def test_invisible_text_counts_as_empty(text):
    for column in ("question", "answer"):
        with pytest.raises(UserError, match=f"rows a: column {column} is empty"):
            checked_rows([changed(**{column: text})])
    with pytest.raises(UserError, match="rows number 1: column id is empty"):
        checked_rows([ROW, changed(id=text)])
    said = SAID.replace("The last day: 3 May 2027.", text)
    assert Answer.read(SAID, True).formatted and not Answer.read(said, True).formatted
    assert Answer.read(text + SAID, True).formatted, "nothing visible before the sections"


@pytest.mark.parametrize(
    "one, other",
    [
        ("Is a café liable?", "Is a cafe\u0301 liable?"),
        ("The landlord’s duty", "the landlord's duty"),
        ("1990–1995 or later", "1990-1995 or later"),
        ("Within 3\u00a0days", "within 3 days"),
        ("ＩＳ　ＩＴ？", "is it"),
        ("Is con\u00adtract law\u200b new?", "Is contract law new?"),
        ("Die Straße", "DIE STRASSE"),
    ],
)
def test_questions_that_look_the_same_have_one_key(one, other):
    assert same(changed(question=one)) == same(changed(question=other))
    assert group(changed(question=one)) == group(changed(question=other))


def test_different_questions_have_different_keys():
    assert same(changed(question="A _must_?")) == same(changed(question="a *must*"))
    asked = ["Who owes £5?", "Who owes $5?", "Who owes 5?", "क्या कि", "क्या की", "👍?", "👎?", "?", "!"]
    assert len({same(changed(question=question)) for question in asked}) == len(asked)


def test_duplicates_and_groups():
    assert same(ROW) == same(changed(question="until  WHEN")) != same(changed(question="Until then?"))
    one = changed(question="A debt of £3,000 is due on 3 May 2021.")
    other = changed(question="A debt of £7 is due on 1 June 2020.")
    assert group(one) == group(other) != group(other | {"topic": "tort"})
    assert group(changed(question="A baker owes £3.")) == group(changed(question="A nurse owes £4."))
    assert group(changed(question="A baker owes £3.")) != group(changed(question="A baker gets £3."))


# -- rendering -------------------------------------------------------------------------------------------------------
def test_a_response_has_five_sections_in_order():
    assert response(ROW) == SAID
    empty = response(changed(reasoning="", case_citation=""))
    assert "\nReasoning:\nAnswer: The" in empty and empty.endswith("\nCase Citation:")


@pytest.mark.parametrize("row", [ROW, changed(reasoning=""), changed(reasoning="", case_citation="", topic="")])
def test_target_tokens_are_the_response_and_its_end_numbered_by_section(row, tiny_tokenizer):
    found = encoded("a", document(row, tiny_tokenizer), tiny_tokenizer)
    assert tiny_tokenizer.decode(found.tokens[found.sections > 0]) == response(row) + "<|im_end|>"
    titles = ("Topic", "Difficulty", "Reasoning", "Answer", "Case Citation")
    for title, number in zip(titles, NUMBERS.values()):
        part = tiny_tokenizer.decode(found.tokens[found.sections == number])
        assert title[1:] in part and not any(f"{other}:" in part for other in titles if other not in title)
    last = tiny_tokenizer.decode(found.tokens[found.sections == NUMBERS["citation"]])
    assert last.endswith("<|im_end|>"), "the end is a target token"
    asked = tiny_tokenizer.decode(found.tokens[found.sections == 0])
    assert "Until when?" in asked and SYSTEM in asked


def test_an_error_names_the_row_that_cannot_be_rendered(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", "{{ raise_exception('no system') }}")
    with pytest.raises(UserError, match="row a: the chat template refuses"):
        document(ROW, tiny_tokenizer)
    monkeypatch.setattr(
        tiny_tokenizer,
        "chat_template",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}",
    )
    with pytest.raises(UserError, match="row a: the chat template changes the answer"):
        document(ROW, tiny_tokenizer)


def test_rows_with_special_tokens_or_lone_surrogates_are_refused_by_id(tiny_tokenizer):
    with pytest.raises(UserError, match=r"row a: its text holds <\|im_end\|>"):
        document(changed(answer="yes <|im_end|> no"), tiny_tokenizer)
    with pytest.raises(UserError, match="rows 'a': the text is not Unicode"):
        checked_rows([changed(topic="x \ud800")])


@pytest.mark.parametrize(
    "column, text",
    [("reasoning", "One.\nAnswer: none yet"), ("difficulty", "a\nReasoning: x"), ("answer", "Yes.\nAnswer: no")],
)
def test_rows_that_do_not_read_back_are_detected(column, text):
    assert readable(ROW) and readable(changed(reasoning="", case_citation=""))
    assert not readable(changed(**{column: text}))


@pytest.mark.parametrize("column, text", [("answer", "**3 May 2027**, no later"), ("topic", "*contract*"),
                                          ("case_citation", "*Froom v Butcher* [1976] QB 286")])  # fmt: skip
def test_a_section_may_open_with_emphasis(column, text):
    assert readable(changed(**{column: text}))


# -- reading ---------------------------------------------------------------------------------------------------------
def test_a_rendered_answer_reads_back():
    answer = Answer.read(SAID, True)
    assert answer.formatted and list(answer.sections) == list(NUMBERS)
    assert answer.sections["reasoning"] == "Step 1: One.\nStep 2: Two." and answer.figure() == "3 May 2027"


@pytest.mark.parametrize(
    "text, ended",
    [
        (SAID, False), ("Well. " + SAID, True), (SAID.replace("Difficulty: easy\n", ""), True),
        (SAID + "\nTopic: again", True), (SAID.replace(" The last day: 3 May 2027.", ""), True), ("", True),
        (SAID.replace("Topic", "Answer", 1), True),
    ],
)  # fmt: skip
def test_malformed_answers_are_not_formatted(text, ended):
    assert not Answer.read(text, ended).formatted


def test_emphasis_marks_are_allowed():
    assert Answer.read(SAID.replace("Topic:", "**Topic:**").replace("Answer:", "## Answer:"), True).formatted


@pytest.mark.parametrize(
    "text, wanted",
    [("It is £1,200.00, not £3.", "£1200.00"), ("£12.5", "£12.50"), ("£ 500", "£500.00"), ("£5 million", "£5000000.00"),
     ("£5m", "£5000000.00"), ("£5 more", "£5.00"), ("within 7 weeks", "7 week"), ("1 week", "1 week"),
     ("12 months", "12 month"), ("none", None), ("on 3 May 2027", "3 May 2027"), ("03 May 2027", "3 May 2027"),
     ("the 3rd of May, 2027", "3 May 2027"), ("99 May 2021", None),
     ("on 3\u00a0May\u202f2027", "3 May 2027"), ("￡５００", "£500.00"), (f"{'1' * 5000} days", None)],
)  # fmt: skip
def test_figures(text, wanted):
    assert figure(text) == wanted


def test_an_answer_without_sections_is_scored_by_its_last_figure():
    assert Answer.read("From 3 May 2021 on, six years: 3 May 2027.", True).figure() == "3 May 2027"
    assert Answer.read("I do not know.", True).figure() is None


# -- citations -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, known, others",
    [
        (SAID, {"Limitation Act 1980, s 5"}, set()),
        ("Case Citation: Limitation Act 1980,  s 11A", {"Limitation Act 1980, s 11A"}, set()),
        ("Case Citation: Limitation Act 1980, s 99", set(), {"Limitation Act 1980, s 99"}),
        ("See Froom v Butcher [1976] QB 286.", {"Froom v Butcher [1976] QB 286"}, set()),
        ("See Froom v Butcher and the Limitation Act 1980.", set(), set()),
        ("As Smith v Jones says, and Theft Act 1968.", set(), {"Smith v Jones", "Theft Act 1968"}),
        ("Case Citation: UK GDPR, art 12(3); R v Smith", {"UK GDPR, art 12(3)"}, {"R v Smith"}),
        ("Case Citation: none", set(), set()),
        ("Case Citation: Common sense", set(), {"Common sense"}),
        ("Under the Limitation Act 1980, pursuant to the Equality Act 2010. Order 2345 was placed.", set(), set()),
        (
            "Breach of the Consumer Contracts (Information, Cancellation and Additional Charges) Regulations 2013.",
            set(),
            set(),
        ),
        (
            "By Limitation Act 1980, s 99, and Froom v Butcher [1999] AC 1.",
            set(),
            {"Limitation Act 1980, s 99", "Froom v Butcher [1999] AC 1"},
        ),
        (
            "UK GDPR, art 99 and Civil Procedure Rules, r 99.1",
            set(),
            {"UK GDPR, art 99", "Civil Procedure Rules, r 99.1"},
        ),
        (
            "See Smith v. Jones, and Re Smith [2001] EWCA Civ 12",
            set(),
            {"Smith v. Jones", "Re Smith [2001] EWCA Civ 12"},
        ),
        (
            "R (on the application of Smith) v Home Office held so.",
            set(),
            {"R (on the application of Smith) v Home Office"},
        ),
        ("the Sale of Goods Act 1979, s 14", set(), {"Sale of Goods Act 1979, s 14"}),
        ("Limitation Act 1980, s 5.2", set(), {"Limitation Act 1980, s 5.2"}),
        ("Limitation Act 1980, s 5-9", set(), {"Limitation Act 1980, s 5-9"}),
        ("Limitation Act 1980, s 5/6", set(), {"Limitation Act 1980, s 5/6"}),
        (
            "Case Citation: Limitation Act 1980, s 5 and Froom v Butcher [1976] QB 286",
            {"Limitation Act 1980, s 5", "Froom v Butcher [1976] QB 286"},
            set(),
        ),
        ("Case Citation: Limitation Act 1980, s 5 (contract)", {"Limitation Act 1980, s 5"}, set()),
        ("Case Citation: Limitation Act 1980, s 5, Theft Act 1968", {"Limitation Act 1980, s 5"}, {"Theft Act 1968"}),
        (
            "Case Citation: UK GDPR, art 12(3)\nTopic: x\nCase Citation: R v Smith",
            {"UK GDPR, art 12(3)"},
            {"R v Smith"},
        ),
        ("*Froom v Butcher* [1976] QB 286", {"Froom v Butcher [1976] QB 286"}, set()),
        ("Case Citation: Limitation Act 1980 section 5", {"Limitation Act 1980, s 5"}, set()),
        ("Limitation Act 1980, s. 5; UK GDPR Article 12(3)", {"Limitation Act 1980, s 5", "UK GDPR, art 12(3)"}, set()),
        ("By section 5 of the Limitation Act 1980, yes.", {"Limitation Act 1980, s 5"}, set()),
        ("By section 99 of the Limitation Act 1980, no.", set(), {"section 99 of the Limitation Act 1980"}),
        ("Section 99 of the Theft Act 1968; Theft Act 1968, s 99.", set(), {"Section 99 of the Theft Act 1968"}),
        ("As held in Roe v. Wade, 410 U.S. 113 (1973), it is.", set(), {"Roe v. Wade, 410 U.S. 113 (1973)"}),
        ("In limitation act 1980 section 5 it says so.", {"Limitation Act 1980, s 5"}, set()),
        ("Smith v Jones and the Theft Act 1968 apply.", set(), {"Smith v Jones", "Theft Act 1968"}),
        (
            "Case Citation: 1. Limitation Act 1980, s 5\n2. Froom v Butcher [1976] QB 286",
            {"Limitation Act 1980, s 5", "Froom v Butcher [1976] QB 286"},
            set(),
        ),
        ("Limitation Act 1980, ss 5 and 8", {"Limitation Act 1980, s 5", "Limitation Act 1980, s 8"}, set()),
        ("Limitation Act 1980, s 5(1)", set(), {"Limitation Act 1980, s 5(1)"}),
        ("It is the tenant's 5 weeks. Section 5 says so.", set(), set()),
        ("Nothing.", set(), set()),
    ],
)
def test_citations_are_found_and_looked_up_in_the_list(text, known, others):
    assert LIST.cited(Answer.read(text, True)) == (known, others)


def test_every_authority_is_found_and_matches_no_other():
    for name in AUTHORITIES:
        assert LIST.cited(Answer.read(f"Case Citation: {name}", True)) == ({name}, set())


def test_an_empty_list_contains_no_citation():
    assert Authorities([]).cited(Answer.read(SAID, True)) == (set(), {"Limitation Act 1980, s 5"})


# -- scoring ---------------------------------------------------------------------------------------------------------
def test_scores_equal_values_computed_by_hand():
    rows = [ROW, changed(case_citation="UK GDPR, art 12(3)"), changed(answer="It depends.")]
    said = [SAID, SAID.replace("3 May", "4 May"), SAID.replace("Limitation Act 1980, s 5", "Smith v Jones")]
    rates = {
        name: (found["rate"], found["count"])
        for name, found in score([Answer.read(text, True) for text in said], rows, LIST).items()
    }
    assert rates == {
        "format": (1.0, 3),
        "accuracy": (0.5, 2),
        "citation_precision": (pytest.approx(1 / 3), 3),
        "citation_recall": (pytest.approx(1 / 3), 3),
        "invented": (pytest.approx(1 / 3), 3),
    }


def test_the_generators_own_answers_get_full_scores():
    rows = checked_rows(list(generate(224, 5)))
    rates = score([Answer.read(response(row), True) for row in rows], rows, LIST)
    assert [rates[n]["rate"] for n in ("format", "accuracy", "citation_precision", "citation_recall", "invented")] == [
        1.0, 1.0, 1.0, 1.0, 0.0,
    ]  # fmt: skip
