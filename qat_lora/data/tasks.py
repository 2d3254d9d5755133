"""Three multiple-choice tasks for lm-evaluation-harness whose questions are generated, so that no download is needed.

Each is a generator of documents {"context", "choices", "answer"}; the harness scores the log-likelihood of each choice
after the context.
"""

import inspect
import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module

from datasets import Dataset

from qat_lora.errors import UserError

Document = dict[str, str | list[str] | int]

NOUNS = {
    "book": "books", "car": "cars", "child": "children", "dog": "dogs", "farmer": "farmers", "horse": "horses",
    "key": "keys", "king": "kings", "letter": "letters", "man": "men", "picture": "pictures", "river": "rivers",
    "shop": "shops", "teacher": "teachers", "tree": "trees", "woman": "women",
}  # fmt: skip
BETWEEN = ("near", "behind", "next to", "in front of", "beside")
VERBS = (("is", "are"), ("was", "were"), ("has", "have"))
THINGS = (
    "apple", "ball", "boat", "bottle", "clock", "coat", "cup", "drum", "flag", "guitar", "hammer", "hat", "kite",
    "lamp", "map", "pen", "piano", "ring", "rope", "shirt", "table", "watch",
)  # fmt: skip


def agreement(draw: random.Random) -> Iterator[Document]:
    """Does the verb agree with its noun, not with a nearer one of the other number? "The keys near the tree" are."""
    for index in itertools.count():
        subject, other = draw.sample(sorted(NOUNS), 2)
        plural, verb = index % 2, draw.choice(VERBS)
        nouns = (NOUNS[subject], other) if plural else (subject, NOUNS[other])
        context = f"The {nouns[0]} {draw.choice(BETWEEN)} the {nouns[1]}"
        yield {"context": context, "choices": [*verb], "answer": plural}


def recall(draw: random.Random) -> Iterator[Document]:
    """Does the model repeat a list of eight words that is in its context?"""
    while True:
        words = draw.sample(THINGS, 8)
        place = draw.randrange(2, 8)
        others = draw.sample([word for word in words if word != words[place]], 3)
        choices = draw.sample([words[place], *others], 4)
        context = f"{', '.join(words)}. {', '.join(words[:place])},"
        yield {"context": context, "choices": choices, "answer": choices.index(words[place])}


def docstring(draw: random.Random) -> Iterator[Document]:
    """Which six words continue a docstring of Python's standard library? The others continue other docstrings."""
    passages = _passages()
    if len(passages) < 4:
        raise UserError("task docstring: this Python has no docstrings (python -OO); run without -OO")
    order = itertools.chain.from_iterable(draw.sample(passages, len(passages)) for _ in itertools.count())
    for words in order:
        start = draw.randrange(12, len(words) - 5)
        choices = [" ".join(words[start : start + 6])]
        while len(choices) < 4:
            other = " ".join(draw.choice(passages)[6:12])
            choices += [other] * (other not in choices)
        true = choices[0]
        draw.shuffle(choices)
        yield {"context": " ".join(words[:start]), "choices": choices, "answer": choices.index(true)}


def _passages() -> list[list[str]]:
    """The words of paragraphs of prose, of 20 to 80 words, in the docstrings of the standard library."""
    found = {}
    for name in ("argparse", "collections", "csv", "decimal", "difflib", "email", "inspect", "logging", "os", "random",
                 "shutil", "socket", "statistics", "string", "subprocess", "tarfile", "textwrap", "threading",
                 "unittest"):  # fmt: skip
        module = import_module(name)
        for thing in [module, *(value for _, value in sorted(vars(module).items()) if callable(value))]:
            for paragraph in re.split(r"\n\s*\n", inspect.getdoc(thing) or ""):
                words = paragraph.split()
                if 20 <= len(words) <= 80 and ">>>" not in words:
                    found[" ".join(words)] = words
    return list(found.values())


TASKS: dict[str, Callable[[random.Random], Iterator[Document]]] = {
    "agreement": agreement, "recall": recall, "docstring": docstring,
}  # fmt: skip


def local_task(name: str, items: int) -> dict:
    """The harness's description of a local task with so many questions. They are the same on every machine, those of
    `docstring` on every machine with the same Python."""

    def documents(**_) -> dict[str, Dataset]:
        return {"test": Dataset.from_list(list(itertools.islice(TASKS[name](random.Random(name)), items)))}

    return {
        "task": name,
        "custom_dataset": documents,
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": sys.version.split()[0] if name == "docstring" else 1},
    }
