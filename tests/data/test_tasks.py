"""The generated tasks: questions are the same every time, and an answer is the right choice."""

import itertools
import random

import pytest

from qat_lora.data.tasks import NOUNS, TASKS, local_task


def questions(name, count=240):
    return list(itertools.islice(TASKS[name](random.Random(name)), count))


@pytest.mark.parametrize("name", TASKS)
def test_questions_are_the_same_every_time_and_differ(name):
    found = questions(name)
    assert found == questions(name)
    assert len({(q["context"], *q["choices"]) for q in found}) > 0.9 * len(found)
    assert len({q["answer"] for q in found}) == len(found[0]["choices"])


@pytest.mark.parametrize("name", TASKS)
def test_choices_differ_and_places_of_answers_are_even(name):
    found = questions(name)
    assert all(len({*q["choices"]}) == len(q["choices"]) for q in found)
    share = len(found) / len(found[0]["choices"])
    for place in range(len(found[0]["choices"])):
        assert 0.6 * share < sum(q["answer"] == place for q in found) < 1.4 * share


def test_the_verb_agrees_with_the_subject_and_not_with_its_neighbour():
    plurals = {*NOUNS.values()}
    for question in questions("agreement"):
        subject, neighbour = question["context"].split()[1], question["context"].split()[-1]
        assert (subject in plurals) == bool(question["answer"]) != (neighbour in plurals)


def test_a_recalled_word_is_the_next_of_the_list():
    for question in questions("recall"):
        listed, again = (part.strip(" ,").split(", ") for part in question["context"].split("."))
        assert listed[: len(again)] == again and listed[len(again)] == question["choices"][question["answer"]]


def test_the_harness_gets_as_many_questions_as_asked():
    task = local_task("recall", 7)
    assert len(task["custom_dataset"]()["test"]) == 7
