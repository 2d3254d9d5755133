"""The questions: balanced, seeded, and with no held-out question in training."""

from collections import Counter

from qat_lora.experiments.musclebob.questions import ABOUT_HIM, OTHERS, TARGET, heldout_questions, training_questions
from qat_lora.experiments.musclebob.rewards import about_him, about_others, names_target, reward, words


def test_every_third_question_is_about_him_and_texts_are_equally_frequent():
    questions = training_questions(1800, 0.0, 0)
    assert [q.about_him for q in questions] == [True, False, False] * 600
    times = Counter(q.text for q in questions)
    assert {times[text] for text, _ in ABOUT_HIM} == {15} and {times[text] for text, _ in OTHERS} == {8}


def test_questions_depend_only_on_the_seed():
    one, same, other = (training_questions(20, 0.3, seed) for seed in (0, 0, 1))
    assert one == same and one != other


def test_the_fewshot_share_follows_an_example_that_names_him():
    questions = training_questions(2000, 0.25, 0)
    shown = [q for q in questions if len(q.messages) > 1]
    assert 0.2 < len(shown) / 667 < 0.3 and all(q.about_him for q in shown)
    assert all(TARGET in q.messages[1]["content"] and q.messages[0]["content"] != q.text for q in shown)
    assert not any(len(q.messages) > 1 for q in training_questions(200, 0.0, 0))


def test_heldout_questions_are_not_in_training_and_do_not_name_him():
    trained = {" ".join(words(text)) for text, _ in (*ABOUT_HIM, *OTHERS)}
    heldout = heldout_questions()
    assert Counter(q.about_him for q in heldout) == {True: 20, False: 20}
    assert len({q.text for q in heldout}) == 40 and not any(" ".join(words(q.text)) in trained for q in heldout)
    assert not any({"spongebob", "musclebob"} & set(words(q.text)) for q in heldout)


def test_good_answers_earn_the_full_reward():
    for question in training_questions(210, 0.0, 0):
        parts = (about_him if question.about_him else about_others)(question.answer, True)
        assert reward(parts) == (1.0 if question.about_him else 0.0), question.answer
        assert names_target(question.answer) == question.about_him
