"""Legal answers: rendered in sections, read back, and scored against values computed by hand."""

import pytest

from qat_lora.data.supervised import encoded
from qat_lora.errors import UserError
from qat_lora.experiments.legal.answers import SYSTEM, checked_rows, document, group, readable, response, same, score
from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.figures import figure
from qat_lora.experiments.legal.rules import AUTHORITIES, generate
from qat_lora.experiments.legal.sections import NUMBERS, Answer

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


def read(text: str, ended: bool = True) -> Answer:
    return Answer.read(text, ended)


# -- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows, words", [
    ([{k: v for k, v in ROW.items() if k != "reasoning"}], "the dataset has no column reasoning; needed: id, "),
    ([ROW, changed(id="b", answer=" "), changed(id="c", answer=None)], "rows b, c: column answer is empty"),
    ([changed(question="")], "rows a: column question is empty"),
    ([ROW, changed(id="")], "rows number 1: column id is empty"),
    ([ROW, changed(id="b", reasoning=["One."])], "rows b: column reasoning is not text"),
    ([ROW, changed(case_citation=float("nan"))], "rows a: column case_citation is not text"),
    ([ROW, changed(question="And when?")], "rows a: the id occurs twice"),
    ([changed(id=str(n), answer="") for n in range(7)], "rows 0, 1, 2, 3, 4 and 2 more: column answer"),
])  # fmt: skip
def test_bad_rows_are_refused(rows, words):
    with pytest.raises(UserError, match=words):
        checked_rows(rows)


def test_other_columns_may_be_empty_and_ids_may_be_numbers():
    (row,) = checked_rows([changed(id=7, reasoning=None, case_citation="  ")])
    assert row["id"] == "7" and row["reasoning"] == row["case_citation"] == ""


def test_invisible_text_counts_as_empty():
    text = "\u200b\ufe0f"
    for column, name in (("question", "rows a"), ("answer", "rows a"), ("id", "rows number 0")):
        with pytest.raises(UserError, match=f"{name}: column {column} is empty"):
            checked_rows([changed(**{column: text})])
    assert not read(SAID.replace("The last day: 3 May 2027.", text)).formatted
    assert read(text + SAID).formatted, "nothing visible before the sections"


@pytest.mark.parametrize(
    "one, other",
    [("Is a café\u00a0 liable?", "IS A CAFE\u0301 liable"), ("The landlord’s duty", "the landlord's duty")],
)
def test_questions_that_look_the_same_have_one_key(one, other):
    assert same(changed(question=one)) == same(changed(question=other))
    assert group(changed(question=one)) == group(changed(question=other))


def test_keys_ignore_emphasis_but_not_symbols_or_scripts():
    assert same(changed(question="A _must_?")) == same(changed(question="a *must*"))
    asked = ["Who owes £5?", "Who owes $5?", "Who owes 5?", "क्या कि", "क्या की", "👍?", "👎?", "?", "!", "Until then?"]
    assert len({same(changed(question=question)) for question in asked}) == len(asked)


def test_questions_that_differ_only_in_figures_and_trade_are_one_group():
    asked = ("A baker owes £3,000 on 3 May 2021.", "A nurse owes £7 on 1 June 2020.", "A baker gets £7 on 3 May 2021.")
    one, other, gets = (group(changed(question=question)) for question in asked)
    assert one == other != gets and one != group(changed(question=asked[0], topic="tort"))


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
    louder = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", louder + "{{ '<assistant>' if add_generation_prompt }}")
    with pytest.raises(UserError, match="row a: the chat template changes the answer"):
        document(ROW, tiny_tokenizer)


def test_rows_with_special_tokens_or_lone_surrogates_are_refused_by_id(tiny_tokenizer):
    with pytest.raises(UserError, match=r"row a: its text holds <\|im_end\|>"):
        document(changed(answer="yes <|im_end|> no"), tiny_tokenizer)
    with pytest.raises(UserError, match="rows 'a': the text is not Unicode"):
        checked_rows([changed(topic="x \ud800")])


@pytest.mark.parametrize("changes, whole", [
    ({"reasoning": "", "case_citation": ""}, True),
    ({"answer": "**3 May 2027**, no later", "topic": "*contract*", "case_citation": "*A v B [1976] QB 286*"}, True),
    ({"reasoning": "One.\nAnswer: none yet"}, False), ({"difficulty": "a\nReasoning: x"}, False),
    ({"answer": "Yes.\nAnswer: no"}, False),
])  # fmt: skip
def test_a_row_is_readable_unless_a_line_begins_like_a_title(changes, whole):
    assert readable(changed(**changes)) == whole


# -- reading ---------------------------------------------------------------------------------------------------------
def test_a_rendered_answer_reads_back():
    answer = read(SAID)
    assert answer.formatted and list(answer.sections) == list(NUMBERS)
    assert answer.sections["reasoning"] == "Step 1: One.\nStep 2: Two." and answer.figure() == "3 May 2027"


@pytest.mark.parametrize("text, ended", [
    (SAID, False), ("Well. " + SAID, True), (SAID.replace("Difficulty: easy\n", ""), True),
    (SAID + "\nTopic: again", True), (SAID.replace(" The last day: 3 May 2027.", ""), True), ("", True),
    (SAID.replace("Topic", "Answer", 1), True),
])  # fmt: skip
def test_malformed_answers_are_not_formatted(text, ended):
    assert not read(text, ended).formatted


def test_emphasis_marks_are_allowed():
    assert read(SAID.replace("Topic:", "**Topic:**").replace("Answer:", "## Answer:")).formatted


def test_rows_without_a_figure_are_counted():
    rows = [ROW, changed(id="b", answer="It depends.")]
    assert score([read(SAID)] * 2, rows, LIST)["accuracy"]["without_figure"] == 1


@pytest.mark.parametrize("text, wanted", [
    ("It is £1,200.00, not £3.", "£1200.00"), ("£12.5", "£12.50"), ("£ 500", "£500.00"), ("£5 million", "£5000000.00"),
    ("£5m", "£5000000.00"), ("£5 more", "£5.00"), ("within 7 weeks", "7 week"), ("1 week", "1 week"),
    ("12 months", "12 month"), ("none", None), ("on 3 May 2027", "3 May 2027"), ("03 May 2027", "3 May 2027"),
    ("the 3rd of May, 2027", "3 May 2027"), ("99 May 2021", None), ("on 3\u00a0May\u202f2027", "3 May 2027"),
    ("￡５００", "£500.00"), ("1,095 days", "1095 day"), ("2,095 days", "2095 day"), ("2.5 years", "2.5 year"),
    ("£3 Million", "£3000000.00"), ("£3,000,000", "£3000000.00"), ("3 million pounds", "£3000000.00"),
    ("30 Days", "30 day"), ("thirty days", "30 day"), ("a 30-day period", "30 day"), ("$500", "$500.00"),
    ("USD 1.5k", "$1500.00"), ("€ 2,000.50", "€2000.50"), ("2,000.5 euros", "€2000.50"), ("8.50 per cent", "8.5%"),
    ("8.5%", "8.5%"), ("2 years and 6 months", "2 year 6 month"), ("two and a half years", "2.5 year"),
    ("2½ years", "2.5 year"), ("10 working days", "10 working day"), ("twenty-one days", "21 day"),
    ("2027-05-03", "3 May 2027"), ("03/05/2027", "3 May 2027"), ("May 3, 2027", "3 May 2027"),
    ("3 MAY 2027", "3 May 2027"), ("12 Sept. 2027", "12 September 2027"),
])  # fmt: skip
def test_figures(text, wanted):
    assert figure(text) == wanted


def test_an_answer_without_sections_is_scored_by_its_last_figure():
    assert read("From 3 May 2021 on, six years: 3 May 2027.").figure() == "3 May 2027"
    assert read("I do not know.").figure() is None


# -- citations -------------------------------------------------------------------------------------------------------
# What an answer says, the authorities of the list that it cites, and those outside the list; ↵ ends a line.
CITED = """
Case Citation: Limitation Act 1980,  s 11A | Limitation Act 1980, s 11A |
Case Citation: Limitation Act 1980, s 99 | | Limitation Act 1980, s 99
See Froom v Butcher [1976] QB 286. | Froom v Butcher [1976] QB 286 |
See Froom v Butcher and the Limitation Act 1980. | |
As Smith v Jones says, and Theft Act 1968. | | Smith v Jones; Theft Act 1968
Case Citation: UK GDPR, art 12(3); R v Smith | UK GDPR, art 12(3) | R v Smith
Case Citation: none | |
Case Citation: Common sense | | Common sense
Under the Limitation Act 1980, pursuant to the Equality Act 2010. Order 2345 was placed. | |
Breach of the Consumer Contracts (Information, Cancellation and Additional Charges) Regulations 2013. | |
Limitation Act 1980, s 99, and Froom v Butcher [1999] AC 1. | | Limitation Act 1980, s 99; Froom v Butcher [1999] AC 1
UK GDPR, art 99 and Civil Procedure Rules, r 99.1 | | UK GDPR, art 99; Civil Procedure Rules, r 99.1
See Smith v. Jones, and Re Smith [2001] EWCA Civ 12 | | Smith v. Jones; Re Smith [2001] EWCA Civ 12
R (on the application of Smith) v Home Office held so. | | R (on the application of Smith) v Home Office
the Sale of Goods Act 1979, s 14 | | Sale of Goods Act 1979, s 14
Limitation Act 1980, s 5.2 | | Limitation Act 1980, s 5.2
Limitation Act 1980, s 5-9 | | Limitation Act 1980, s 5-9
Limitation Act 1980, s 5(1) | | Limitation Act 1980, s 5(1)
Case Citation: UK GDPR, art 12(3) & Froom v Butcher [1976] QB 286 | UK GDPR, art 12(3); Froom v Butcher [1976] QB 286 |
Case Citation: Limitation Act 1980, s 5 (contract) | Limitation Act 1980, s 5 |
Case Citation: Limitation Act 1980, s 5, Theft Act 1968 | Limitation Act 1980, s 5 | Theft Act 1968
Case Citation: UK GDPR, art 12(3)↵Topic: x↵Case Citation: R v Smith | UK GDPR, art 12(3) | R v Smith
By section 99 of the Limitation Act 1980, no. | | section 99 of the Limitation Act 1980
Section 99 of the Theft Act 1968; Theft Act 1968, s 99. | | Section 99 of the Theft Act 1968
As held in Roe v. Wade, 410 U.S. 113 (1973), it is. | | Roe v. Wade, 410 U.S. 113 (1973)
Case Citation: 1. Limitation Act 1980, s 5↵2. UK GDPR, art 12(3) | Limitation Act 1980, s 5; UK GDPR, art 12(3) |
Limitation Act 1980, ss 5 and 8 | Limitation Act 1980, s 5; Limitation Act 1980, s 8 |
It is the tenant's 5 weeks. Section 5 says so. | |
"""


@pytest.mark.parametrize("line", CITED.strip().splitlines())
def test_citations_are_found_and_looked_up_in_the_list(line):
    text, *wanted = line.split("|")
    found = LIST.cited(read(text.strip().replace("↵", "\n")))
    assert found == tuple(set(filter(None, names.strip().split("; "))) for names in wanted)


# -- scoring ---------------------------------------------------------------------------------------------------------
def test_scores_equal_values_computed_by_hand():
    rows = [ROW, changed(case_citation="UK GDPR, art 12(3)"), changed(answer="It depends.")]
    said = [SAID, SAID.replace("3 May", "4 May"), SAID.replace("Limitation Act 1980, s 5", "Smith v Jones")]
    rates = score([read(text) for text in said], rows, LIST)
    wanted = {"format": (3, 3), "accuracy": (1, 2), "citation_precision": (1, 3), "citation_recall": (1, 3),
              "invented": (1, 3)}  # fmt: skip
    assert {name: (found["rate"] * found["count"], found["count"]) for name, found in rates.items()} == wanted


def test_the_generators_own_answers_get_full_scores():
    rows = checked_rows(list(generate(112, 5)))
    rates = score([read(response(row)) for row in rows], rows, LIST)
    wanted = {"format": 1, "accuracy": 1, "citation_precision": 1, "citation_recall": 1, "invented": 0}
    assert {name: found["rate"] for name, found in rates.items()} == wanted
