"""The legal generator: its answers follow from its own law, and it cites nothing outside its list."""

import re
from collections import Counter
from datetime import date, datetime
from functools import partial
from types import SimpleNamespace

import pytest

from qat_lora.data.text import read_rows
from qat_lora.errors import UserError
from qat_lora.experiments.legal.figures import figure
from qat_lora.experiments.legal.periods import later
from qat_lora.experiments.legal.rules import AUTHORITIES, FIRST_DAY, LARGEST_COUNT, RULES, TYPES, generate

NAMES = ["id", "question", "answer", "topic", "difficulty", "case_citation", "reasoning", "jurisdiction", "sample_type"]
VALUE = r"£?\d[\d,]*(?:\.\d+)?%?"


@pytest.fixture(scope="module")
def rows():
    return list(generate(1120, 0))


def number(text: str) -> float:
    return float(text.strip("£%").replace(",", ""))


def test_rows_have_the_columns_and_depend_only_on_the_seed(rows):
    assert all(list(row) == NAMES and all(row.values()) for row in rows)
    assert list(generate(50, 0)) == rows[:50] and next(generate(1, 1)) != rows[0]
    assert len({row["question"] for row in rows}) == len({row["id"] for row in rows}) == len(rows)


def test_sample_types_and_authorities_are_balanced(rows):
    assert Counter(row["sample_type"] for row in rows) == dict.fromkeys(TYPES, 280)
    assert Counter(row["case_citation"] for row in rows) == dict.fromkeys(AUTHORITIES, 1120 // len(AUTHORITIES))
    assert len(set(AUTHORITIES)) == len(RULES)


def test_the_last_step_leads_to_the_answer(rows):
    for row in rows:
        wanted = figure(row["answer"])
        assert wanted and row["reasoning"].startswith("Step 1: ")
        if row["case_citation"] != "Employment Rights Act 1996, s 86":  # its last step is about the maximum
            assert wanted == figure(re.split("is |= ", row["reasoning"].splitlines()[-1])[-1])


@pytest.mark.parametrize("authority, told, said", [
    ("Limitation Act 1980, s 5", "29 February 2020", "28 February 2026"),
    ("Equality Act 2010, s 123", "29 July 2021", "28 October 2021"),
    ("Equality Act 2010, s 123", "31 August 2021", "30 November 2021"),
    ("Equality Act 2010, s 123", "30 November 2019", "29 February 2020"),
    ("Equality Act 2010, s 123", "1 March 2021", "31 May 2021"),
    ("UK GDPR, art 12(3)", "31 January 2021", "28 February 2021"),
    ("Housing Act 2004, s 213", "8 December 2019", "6 January 2020"),
    ("Consumer Rights Act 2015, s 22", "31 January 2021", "2 March 2021"),
    ("Consumer Rights Act 2015, s 22", "26 December 2020", "25 January 2021"),
])  # fmt: skip
def test_periods_end_on_the_dates_that_a_lawyer_would_count(authority, told, said):
    rule = next(rule for rule in RULES if rule.authority == authority)

    drawn = (datetime.strptime(told, "%d %B %Y").date() - FIRST_DAY).days
    facts = rule.draw(SimpleNamespace(randrange=lambda most: drawn, choice=lambda items: items[0]))
    assert told in facts.told and facts.value == said


def test_sums_follow_from_the_figures_of_the_question(rows):
    for row in rows:
        sums, value = re.findall(r"£(\d[\d,]*(?:\.\d+)?)", row["question"]), figure(row["answer"])
        first = number(sums[0]) if sums else None
        if row["case_citation"].endswith("s 5A"):
            assert value == f"£{40 if first < 1000 else 70 if first < 10_000 else 100}.00"
        if row["case_citation"] == "Housing Act 2004, s 214":
            assert number(value) == 3 * first
        if row["case_citation"].startswith("Froom"):
            assert number(value) == first * (0.75 if "altogether" in row["question"] else 0.85)


def test_the_arithmetic_of_every_step_is_right(rows):
    """Checks equations, percentages of a sum, and sums less a percentage."""
    seen = Counter()
    for steps in (row["reasoning"] for row in rows):
        for left, sign, right, result in re.findall(rf"({VALUE}) ([+−×]) ({VALUE}) = ({VALUE})", steps):
            one, other = number(left), number(right) / (100 if right.endswith("%") else 1)
            found = {"+": one + other, "−": one - other, "×": one * other}[sign]
            assert number(result) == pytest.approx(found, abs=0.006), steps
            seen[sign] += 1
        whole = re.search(rf"% of ({VALUE})", steps)
        for share, result in re.findall(rf"({VALUE})(?: of {VALUE})? is ({VALUE})", steps.split("less")[0]):
            if whole and share.endswith("%"):
                assert number(result) == pytest.approx(number(share) * number(whole[1]) / 100, abs=0.006)
                seen["%"] += 1
        for whole, cut, rest in re.findall(rf"({VALUE}) less ({VALUE}) is ({VALUE})", steps):
            assert number(rest) == number(whole) - number(cut)
    assert min(seen[sign] for sign in "+−×%") > 100


def test_length_of_service_fits_the_ages(rows):
    asked = [row["question"] for row in rows if "between the ages of 22 and 40" in row["question"]]
    served = [int(re.search(r"after (\d+) complete years", question)[1]) for question in asked]
    assert served and max(served) <= 19


def test_later_ends_on_the_last_day_of_a_shorter_month():
    assert later(date(2023, 12, 31), 2) == date(2024, 2, 29) and later(date(2024, 2, 29), 12) == date(2025, 2, 28)


@pytest.mark.parametrize("count", [0, -1, LARGEST_COUNT + 1, 10**12])
def test_impossible_counts_are_refused_before_drawing(count, monkeypatch):
    monkeypatch.setattr("random.Random", None)  # nothing is drawn
    with pytest.raises(UserError, match=f"--count {count} must be from 1 to {LARGEST_COUNT}"):
        next(generate(count, 0))


def test_the_scarcest_question_sets_the_largest_count():
    """The client's question on the deposit penalty has fewer variants than any other type and rule."""
    rows = list(generate(LARGEST_COUNT, 1))
    assert len({row["question"] for row in rows}) == LARGEST_COUNT
    scarcest = ("client_interaction", "Housing Act 2004, s 214")
    used = sum((row["sample_type"], row["case_citation"]) == scarcest for row in rows)
    assert used == 2 * len(range(400, 3000, 25)), "all are used, so no further row is possible"
    assert LARGEST_COUNT % (len(TYPES) * len(RULES)) == len(TYPES) * (len(RULES) - 1) + TYPES.index(scarcest[0])


# -- the script ------------------------------------------------------------------------------------------------------
@pytest.fixture
def make(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return partial(run, "make_legal_dataset")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_written_rows_read_back_unchanged(make, rows, suffix, capsys):
    make("count=40", f"output=law.{suffix}")
    assert list(read_rows(f"law.{suffix}")) == rows[:40]
    assert "40 rows in law." in capsys.readouterr().out


@pytest.mark.parametrize("words, said", [
    (["output=law.csv"], "--output law.csv ends in neither .jsonl nor .parquet"), (["count=0"], "--count 0"),
    (["output=there.jsonl"], "there.jsonl already exists"),
])  # fmt: skip
def test_an_error_names_the_bad_input_and_nothing_is_written(make, tmp_path, words, said):
    (tmp_path / "there.jsonl").write_text("")
    with pytest.raises(UserError, match=said):
        make(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["there.jsonl"]


def test_a_dry_run_shows_a_row(make, tmp_path, capsys):
    make("--dry-run")
    assert '"case_citation": "Limitation Act 1980, s 5"' in capsys.readouterr().out and not list(tmp_path.iterdir())
