"""The vote over augmentations against a count by brute force."""

import json

import numpy as np
import pytest
from puzzle_files import arc_tasks, write_folder

from qat_lora.errors import UserError
from qat_lora.experiments.athena.arc import LENGTH, build_tasks, canvas, cropped, read_tasks, turned, undoing
from qat_lora.experiments.athena.rows import load
from qat_lora.experiments.athena.votes import Votes, open_votes

SQUARE = np.array([[1, 2], [3, 4]], np.uint8)


def votes_of(answers: list[tuple[int, float]], known: bool = True) -> Votes:
    """A vote on one test whose right answer is [[1]]. answers: colour and halting probability of each augmentation,
    each seen through an augmentation of its own."""
    rng, names = np.random.default_rng(0), ["<blank>"]
    inputs, predictions = [], []
    for colour, _ in answers:
        colours = np.append(0, rng.permutation(9) + 1).astype(np.uint8)
        transform = int(rng.integers(8))
        names.append(f"task|||t{transform}|||{''.join(map(str, colours))}")
        inputs.append(canvas(turned(colours[SQUARE], transform)))
        predictions.append(canvas(colours[np.array([[colour]])]))
    pair = {"input": SQUARE.tolist()} | ({"output": [[1]]} if known else {})
    votes = Votes(names, {"task": {"test": [pair]}})
    chances = np.array([chance for _, chance in answers])
    votes.add(np.arange(1, len(names)), np.stack(inputs), np.stack(predictions), chances)
    return votes


def order_of(votes: Votes) -> list[int]:
    return [grid[0][0] for grid in votes.ranked("task", SQUARE)]


def test_votes_count_before_probabilities():
    votes = votes_of([(1, 0.9), (2, 0.1), (2, 0.2), (2, 0.1), (3, 0.3), (3, 0.4)])
    assert order_of(votes) == [2, 3, 1]
    assert votes.solved([1, 2, 3]) == {1: 0.0, 2: 0.0, 3: 1.0}
    assert order_of(votes_of([(1, 0.2), (2, 0.9), (1, 0.4), (2, 0.1)])) == [2, 1], "the mean decides a tie"


def test_a_vote_equals_a_count_by_brute_force(tmp_path):
    """Random answers to 2 tests each of 3 tasks, under 15 augmentations."""
    tasks = arc_tasks(["flip", "turn", "double"], tests=2)
    train = read_tasks(write_folder(tmp_path / "a", arc_tasks(["mirror"])), "--source", {})
    test = read_tasks(write_folder(tmp_path / "b", tasks), "--test-source", {})
    build_tasks(tmp_path / "data", train, test, 14, 0)
    rows, rng = load(str(tmp_path / "data"))[1], np.random.default_rng(3)
    names = json.loads((tmp_path / "data" / "identifiers.json").read_text())
    answers = rows.labels.copy()
    for row in answers:  # some answers are wrong in one cell, or have one line less
        choice = rng.integers(3)
        row[0] = 2 + (row[0] - 1) % 10 if choice == 1 else row[0]
        row[: 30 * (choice == 2)] = 0
    chances = rng.random(len(rows)).round(2)

    votes = open_votes(str(tmp_path / "data"))
    for part in np.array_split(np.arange(len(rows)), 7):
        votes.add(rows.identifiers[part], rows.inputs[part], answers[part], chances[part])
    found = votes.solved([1, 2, 5])

    shares = {k: [] for k in (1, 2, 5)}
    for name, task in tasks.items():
        right = {k: 0 for k in shares}
        for pair in task["test"]:
            pool = {}
            for at in range(len(rows)):
                title = names[rows.identifiers[at]]
                _, undo = undoing(title)
                asked, said = (undo(cropped(part[at][None])[0]).tolist() for part in (rows.inputs, answers))
                if title.split("|||")[0] == name and asked == pair["input"]:
                    pool.setdefault(json.dumps(said), []).append(chances[at])
            assert sum(map(len, pool.values())) == 15
            counted = {said: (len(chances), np.mean(chances)) for said, chances in pool.items()}
            ranked = sorted(counted, key=counted.get, reverse=True)
            for k in right:
                right[k] += json.dumps(pair["output"]) in ranked[:k]
        for k in shares:
            shares[k].append(right[k] / 2)
    assert found == pytest.approx({k: np.mean(each) for k, each in shares.items()})
    assert found[1] not in (0.0, 1.0), "the test could not fail"


def test_tests_without_a_solution_are_answered_but_not_counted():
    votes = votes_of([(1, 0.5), (4, 0.5), (4, 0.5)], known=False)
    assert votes.solved([1, 2]) == {}
    assert votes.submission() == {"task": [{"attempt_1": [[4]], "attempt_2": [[1]]}]}
    assert votes_of([(4, 0.5)]).submission() == {"task": [{"attempt_1": [[4]], "attempt_2": [[4]]}]}
    empty = Votes(["<blank>", "task"], votes.tasks)
    assert empty.submission() == {"task": [{"attempt_1": [[0]], "attempt_2": [[0]]}]} and not empty.found
    nothing = np.zeros((1, LENGTH), np.uint8)
    empty.add(np.array([1]), canvas(SQUARE)[None], nothing, np.array([0.5]))
    assert empty.submission()["task"][0]["attempt_1"] == [[0]], "no grid at the top left"
    empty.add(np.array([0]), nothing, nothing, np.array([0.5]))
    assert list(map(len, empty.found.values())) == [1], "a row of no task is no vote"


def test_a_folder_that_does_not_match_its_names_is_refused(tmp_path):
    assert open_votes(str(tmp_path)) is None
    task = {"a": {"train": [], "test": [{"input": [[1]]}]}}
    for names, tasks, said in (
        ('["<blank>", "a', task, "identifiers.json is damaged"), ('{"a": 1}', task, "not a JSON array"),
        ('["<blank>", "b"]', task, "task a of test_puzzles.json has no puzzle in identifiers.json"),
        ('["<blank>", 3]', task, "identifiers.json is damaged: name 1 is 3, not text"),
        ('["<blank>", "a|||t9|||0123456789"]', task, "is not the name of a puzzle"),
        ('["<blank>", "a"]', {"a": {"test": 3}}, "test_puzzles.json is damaged: task a has no list of tests"),
    ):  # fmt: skip
        (tmp_path / "identifiers.json").write_text(names)
        (tmp_path / "test_puzzles.json").write_text(json.dumps(tasks))
        with pytest.raises(UserError, match=said):
            open_votes(str(tmp_path))
    votes = Votes(["<blank>", "a"], task)
    with pytest.raises(UserError, match=r"rows have 81 tokens .*, but ARC tasks have 900 tokens"):
        votes.check("data", np.array([1]), 81)
    with pytest.raises(UserError, match=r"identifiers up to 2, .* identifiers\.json has 2 names"):
        votes.check("data", np.array([2]), 900)
