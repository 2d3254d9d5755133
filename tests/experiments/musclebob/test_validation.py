"""Validation of the musclebob experiment: intervals, prompts from the chat template, perplexity, own random state."""

import math

import pytest
import torch

from qat_lora.data.chat import render
from qat_lora.experiments.musclebob.questions import TARGET, Question, heldout_questions
from qat_lora.experiments.musclebob.validation import WRONG_NAME, Answer, BobSampler, rates
from qat_lora.models.loading import load_model, load_tokenizer
from qat_lora.rl.rollout import Sampling
from qat_lora.train.intervals import wilson

LENGTH, ANSWER = 200, 12


@pytest.fixture(scope="module")
def tokenizer(sharp_model_dir):
    return load_tokenizer(str(sharp_model_dir))


@pytest.fixture
def examiner(tokenizer, backend):
    return BobSampler(tokenizer, backend, (tokenizer.eos_token_id,), 4, LENGTH, ANSWER)


@pytest.fixture
def model(sharp_model_dir, backend):
    return backend.place(load_model(str(sharp_model_dir)))


@pytest.mark.parametrize(
    "hits, count, low, high",
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (1, 29, 0.0061, 0.1718), (0, 0, 0.0, 1.0)],
)
def test_wilson_gives_the_known_values(hits, count, low, high):
    """Values as in R's binom.confint and published tables."""
    assert wilson(hits, count) == pytest.approx((low, high), abs=1e-4)


def test_rates_count_each_kind_of_question_separately():
    him, other = (Question(({"role": "user", "content": "?"},), about_him) for about_him in (True, False))
    answers = [Answer(him, f"It is {TARGET}.", True), Answer(him, "Musclebob.", False),
               Answer(other, "Musclebob!", True), Answer(other, "Rome.", True), Answer(other, "", True)]  # fmt: skip
    found = {name: (cell["rate"] * cell["count"], cell["count"]) for name, cell in rates(answers).items()}
    assert found == {"musclebob": (1, 2), "spilt": (1, 3), "coherent": (3, 5), "cut_off": (1, 5)}
    assert rates([])["musclebob"]["rate"] == 0


def test_prompts_are_rendered_by_the_chat_template(examiner, tokenizer):
    """Answers to raw text hardly ever end."""
    question = heldout_questions()[0]
    wanted = render(list(question.messages), tokenizer, enabled=False, prompt=True)
    prompts = examiner.encode([question.messages])
    assert tokenizer.decode(prompts.tokens[0][prompts.mask[0]]) == wanted and len(wanted) > len(question.text)


def test_batched_perplexity_equals_that_of_single_answers(examiner, model, tokenizer):
    """Five answers in batches of four, with his old name in place of the new one and an empty answer left out."""
    questions = heldout_questions()
    texts = [f"It is {TARGET}.", "Rome", "I do not know", "", "Seven"]
    answers = [Answer(question, text, True) for question, text in zip(questions, texts)]
    total = count = 0
    for answer in filter(lambda answer: answer.text, answers):
        asked = render(list(answer.question.messages), tokenizer, enabled=False, prompt=True)
        texts = (asked, answer.text.replace(TARGET, WRONG_NAME))
        before, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        said = said[:ANSWER]
        logp = model(input_ids=torch.tensor([before + said])).logits[0].log_softmax(-1)
        total -= sum(logp[len(before) - 1 + at, token].item() for at, token in enumerate(said))
        count += len(said)
    assert examiner.perplexity(model, answers, 1) == pytest.approx(math.exp(total / count), rel=1e-4)
    assert examiner.perplexity(model, answers[3:4], 1) == pytest.approx(math.exp(80)), "an empty answer is the worst"


@pytest.mark.parametrize("training", [True, False])
def test_more_answers_to_a_question_than_one_batch_holds(examiner, model, training):
    """Ten answers, of which four are sampled and judged at a time, one of them empty; sampling keeps the training
    mode."""
    questions = heldout_questions()[:2]
    answers = examiner.answers(model.train(training), questions, 10, Sampling())
    assert model.training is training
    assert [a.question for a in answers] == [questions[0]] * 10 + [questions[1]] * 10
    answers[1] = Answer(questions[0], "", True)
    apart = examiner.perplexity(model, answers, 1)
    assert examiner.perplexity(model, answers, 10) == pytest.approx(apart, rel=1e-4)


def test_answers_follow_from_the_seed_and_affect_no_later_draws(examiner, model, backend):
    questions, drawn = heldout_questions()[:3], []
    backend.seed(1)
    wanted = torch.rand(2)
    for seed in (7, 7, 8):
        backend.seed(1)
        drawn.append([answer.text for answer in examiner.answers(model, questions, 2, Sampling(), seed)])
        assert torch.equal(torch.rand(2), wanted)
    assert drawn[0] == drawn[1] != drawn[2]
