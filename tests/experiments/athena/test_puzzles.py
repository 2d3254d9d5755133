"""Puzzles: each has a unique answer and depends only on the seed; symmetries give equivalent puzzles."""

import functools
import itertools

import numpy as np
import pytest

from qat_lora.errors import UserError
from qat_lora.experiments.athena import puzzles
from qat_lora.experiments.athena.puzzles import (
    BOXES,
    as_text,
    generate,
    possible,
    read_puzzles,
    side,
    solve,
    verdict,
    vocab,
)
from qat_lora.experiments.athena.symmetries import answer_class, form, variant
from qat_lora.run import console as progress

KINDS = ("sudoku4", "sudoku6", "sudoku9", "maze7")


@functools.cache
def drawn(kind: str, count: int = 6, seed: int = 0):
    """Questions, answers and their difficulty; do not change them."""
    return generate(kind, count, seed)


def is_full(kind: str, answer: np.ndarray) -> bool:
    """Whether every row, column and box has every digit once, checked without the solver's tables."""
    n, (tall, wide) = side(kind), BOXES[kind]
    grid, digits = answer.reshape(n, n), set(range(2, n + 2))
    boxes = [grid[r : r + tall, c : c + wide] for r in range(0, n, tall) for c in range(0, n, wide)]
    return all(set(np.ravel(unit).tolist()) == digits for unit in (*grid, *grid.T, *boxes))


@functools.cache
def all_4x4() -> np.ndarray:
    """Every full grid [288, 16], from all quadruples of rows."""
    lines = np.array(list(itertools.permutations(range(2, 6))))
    grids = lines[np.indices((24,) * 4).reshape(4, -1).T]  # [24⁴, 4, 4]
    boxes = grids.reshape(-1, 2, 2, 2, 2).swapaxes(2, 3).reshape(-1, 4, 4)
    ok = [(np.sort(units, -1) == range(2, 6)).all((1, 2)) for units in (grids.swapaxes(1, 2), boxes)]
    return grids[ok[0] & ok[1]].reshape(-1, 16)


def ways(maze: np.ndarray, n: int) -> list[int]:
    """Lengths of all paths from S to G that enter no cell twice, by exhaustive search."""
    grid, found = maze.reshape(n, n), []
    start, goal = (tuple(np.argwhere(grid == token)[0]) for token in (3, 4))

    def go(place, seen):
        if place == goal:
            found.append(len(seen) - 1)
        for step in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            near = (place[0] + step[0], place[1] + step[1])
            if grid[near] != 1 and near not in seen and place != goal:
                go(near, {*seen, near})

    go(start, {start})
    return found


# -- the generators --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", BOXES)
def test_a_sudoku_has_a_unique_answer_which_keeps_the_clues(kind):
    for question, answer, _ in zip(*drawn(kind)):
        solutions, _ = solve(question)
        assert len(solutions) == 1 and (solutions[0] == answer).all() and is_full(kind, answer)
        given = question != 1
        assert (question[given] == answer[given]).all() and not given.all()


def test_4x4_solutions_equal_an_exhaustive_search():
    """The solver's answers are all grids that keep the clues."""
    everything = all_4x4()
    assert len(everything) == 288 and all(is_full("sudoku4", grid) for grid in everything)
    rng = np.random.default_rng(0)
    for number in range(40):
        question = everything[rng.integers(288)].copy()
        question[rng.random(16) < 0.3 + number / 80] = 1
        fits = ((question == 1) | (everything == question)).all(1)
        found, _ = solve(question, limit=300)
        assert {bytes(row) for row in found} == {row.astype(np.uint8).tobytes() for row in everything[fits]}


def test_a_contradiction_has_no_answer_and_an_ambiguous_question_has_several():
    twice = np.full(16, 1)
    twice[[0, 1]] = 3
    assert len(solve(twice)[0]) == 0
    assert len(solve(np.full(81, 1))[0]) == 2 and len(solve(np.full(36, 1), limit=5)[0]) == 5


@pytest.mark.parametrize("cells", [np.full(17, 1), np.full(16, 0), np.full(16, 6)])
def test_cells_that_are_not_a_sudoku_are_refused(cells):
    with pytest.raises(UserError, match="not a Sudoku"):
        solve(cells)


@pytest.mark.parametrize("size", [5, 7, 9])
def test_a_maze_has_one_path_and_the_answer_marks_it(size):
    for question, answer, steps in zip(*drawn(f"maze{size}")):
        assert ways(question, size) == [steps]
        assert (answer == 5).sum() == steps - 1 and ((question == 2) >= (answer == 5)).all()
        assert (question == np.where(answer == 5, 2, answer)).all()
        trodden = np.isin(answer.reshape(size, size), (3, 4, 5))
        padded = np.pad(trodden, 1)
        beside = padded[:-2, 1:-1] + 0 + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        assert sorted(beside[trodden].tolist()) == [1, 1] + [2] * (steps - 1)  # a path without branches


@pytest.mark.parametrize("kind", KINDS)
def test_puzzles_depend_only_on_the_seed_and_do_not_repeat(kind):
    questions, answers, difficulty = drawn(kind)
    again, shorter, other = generate(kind, 6, 0), drawn(kind, 3), drawn(kind, seed=1)
    assert all((one == two).all() for one, two in zip((questions, answers, difficulty), again))
    assert (questions[:3] == shorter[0]).all() and (questions != other[0]).any()
    assert len({row.tobytes() for row in questions}) == 6
    assert questions.min() >= 1 and max(questions.max(), answers.max()) < vocab(kind)


def test_more_blanks_are_harder():
    (easy, _, guesses), (hard, _, more) = (generate("sudoku9", 6, 0, limits) for limits in ((0.3, 0.4), (1.0, 1.0)))
    assert guesses.sum() == 0 < more.sum()
    assert ((easy == 1).mean(1) >= 0.29).all() and ((easy == 1).mean(1) <= 0.41).all() and (hard == 1).mean() > 0.6


def test_draws_with_too_few_blanks_are_skipped():
    """Some of the first draws leave only 24 or 25 of 36 cells blank."""
    blanks, most = ((generate("sudoku6", 30, 1, limits)[0] == 1).sum(1) for limits in ((0.72, 1.0), (1.0, 1.0)))
    assert blanks.min() >= 26 > most.min()  # most: as many as each puzzle allows


def test_a_share_of_blanks_that_no_draw_reaches_is_refused(monkeypatch):
    monkeypatch.setitem(puzzles.SHORT, "sudoku9", 8)
    said = r"--least-blanks 0.79: 8 draws of sudoku9 in a row left fewer than 64 of 81 .* lower it to 0\.(6|7)\d,"
    with pytest.raises(UserError, match=said):
        generate("sudoku9", 1, 0, (0.79, 1.0))


@pytest.mark.parametrize("call, said", [
    (("sudoku5", 1, 0), "kind 'sudoku5' is not one of sudoku4, sudoku6, sudoku9, mazeN"),
    (("maze8", 1, 0), "N odd from 5"), (("sudoku4", 0, 0), "--count 0"),
    (("maze5", 10**6, 0), "--count: 1000000 puzzles are more than the 48 maze5 that exist"),
    (("sudoku4", 100_000, 0, (1.0, 1.0)), "100000 puzzles are more than the 85632 sudoku4 that exist with 1 to 1"),
    (("sudoku4", 1, 0, (0.99, 1.0)), "--least-blanks 0.99: no sudoku4 .* more than 12 of its 16 .* 0.75 or less"),
    (("sudoku9", 1, 0, (0.8, 0.9)), "--least-blanks 0.8: no sudoku9 .* more than 64 of its 81 .* 0.79 or less"),
    (("sudoku6", 10**8, 0, (0.001, 0.01)), "100000000 puzzles are more than the 28200960 sudoku6"),
    (("sudoku4", 290, 0, (0.01, 0.02), "--puzzles"), "--puzzles: 290 puzzles are more than"),
    (("sudoku4", 1, 0, (0.9, 0.2)), "--least-blanks 0.9 and --most-blanks 0.2"),
])  # fmt: skip
def test_impossible_requests_are_refused(call, said):
    with pytest.raises(UserError, match=said):
        generate(*call)


def test_drawing_stops_when_it_finds_nothing_new(monkeypatch):
    monkeypatch.setattr(puzzles, "PATIENCE", 20)
    said = r"48 puzzles are more than the \d\d maze5 that could be found: 20 draws in a row gave nothing new; lower it"
    with pytest.raises(UserError, match=said):
        generate("maze5", 48, 0)


def test_4x4_has_two_classes_of_answers_and_as_many_unique_and_minimal_puzzles_as_counted():
    """Checks for every set of clues of one grid in each class whether no other grid has the same clues."""
    grids, bits = all_4x4(), 1 << np.arange(16)
    classes = answer_class("sudoku4", grids)
    assert sorted(classes.count(each) for each in set(classes)) == [96, 192]
    sets, unique, minimal = np.arange(2**16), np.zeros(17, int), np.zeros(17, int)
    blanks = 16 - np.array([number.bit_count() for number in range(2**16)])
    for each in set(classes):
        grid, one = grids[classes.index(each)], np.ones(2**16, bool)
        for shared in {int(row @ bits) for row in grids == grid} - {2**16 - 1}:
            one &= (sets & ~shared) != 0  # some clue differs in the other grid
        least = one & ~np.any([(sets & bit != 0) & one[sets & ~bit] for bit in bits], 0)
        unique += classes.count(each) * np.bincount(blanks[one], minlength=17)
        minimal += classes.count(each) * np.bincount(blanks[least], minlength=17)
    assert unique.tolist() == [*puzzles.UNIQUE_4X4, 0, 0, 0, 0]
    assert minimal.tolist() == [puzzles.MINIMAL_4X4.get(count, 0) for count in range(17)]


def test_possible_equals_the_number_that_a_long_search_finds():
    assert possible("sudoku4", (0.01, 0.02)) == 288 and possible("sudoku4", (0.01, 0.07)) == 288 * 17  # none, or one
    assert len(generate("sudoku4", 288, 0, (0.01, 0.02))[0]) == 288
    assert len(generate("maze5", 46, 0)[0]) == 46 and possible("maze5", (0.4, 1.0)) == 48


@pytest.mark.parametrize("size", [5, 7, 9])
def test_the_number_of_possible_mazes(size):
    """Spanning trees by Kirchhoff's theorem, times the choices of start and goal."""
    across = size // 2
    laplacian = np.zeros((across**2, across**2))
    cell = np.arange(across**2).reshape(across, across)
    for one, other in [*zip(cell[:, :-1].flat, cell[:, 1:].flat), *zip(cell[:-1].flat, cell[1:].flat)]:
        laplacian[[one, other], [one, other]] += 1
        laplacian[[one, other], [other, one]] -= 1
    trees = round(np.linalg.det(laplacian[1:, 1:]))
    assert possible(f"maze{size}", (0.4, 1.0)) == trees * across**2 * (across**2 - 1)
    assert possible("maze11", (0.4, 1.0)) == float("inf")


def test_long_jobs_report_progress(monkeypatch, capsys):
    generate("sudoku4", 5, 0)
    assert not capsys.readouterr().out
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    form("sudoku4", generate("sudoku4", 5, 0)[0])
    answer_class("sudoku6", generate("sudoku6", 2, 0)[1])
    said = capsys.readouterr().err
    assert "3 of 5 sudoku4 drawn" in said and "comparing sudoku4 by symmetry: 4 of 5" in said
    assert "comparing sudoku6 by symmetry: 1 of 2" in said


# -- symmetries and canonical forms ----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_a_variant_is_an_equivalent_puzzle(kind):
    questions, answers, difficulty = drawn(kind)
    rng = np.random.default_rng(0)
    guises, solved = variant(kind, questions, answers, rng)
    assert (guises != questions).any(1).sum() >= 4
    for question, answer, steps in zip(guises, solved, difficulty):
        if kind in BOXES:
            solutions, _ = solve(question)
            assert len(solutions) == 1 and (solutions[0] == answer).all()
        else:
            assert ways(question, side(kind)) == [steps]
            assert (question == np.where(answer == 5, 2, answer)).all()
    assert (variant(kind, questions, answers, np.random.default_rng(0))[0] == guises).all()


@pytest.mark.parametrize("kind", ["sudoku4", "maze7"])
def test_variants_of_a_question_share_its_form_and_other_questions_do_not(kind):
    questions, answers, _ = drawn(kind, 20)
    forms, rng = form(kind, questions), np.random.default_rng(0)
    for _ in range(5):
        assert form(kind, variant(kind, questions, answers, rng)[0]) == forms
    assert len(set(forms)) > 10


@pytest.mark.parametrize("kind", ["sudoku6", "sudoku9"])
def test_variants_of_an_answer_share_its_class(kind):
    questions, answers, _ = drawn(kind, 4)
    classes, rng = answer_class(kind, answers), np.random.default_rng(0)
    for _ in range(3):
        assert answer_class(kind, variant(kind, questions, answers, rng)[1]) == classes
    assert len(set(classes)) > 1


def test_6x6_has_at_most_49_classes_of_answers():
    """A sample of the 28,200,960 grids finds most of the classes and no further one."""
    answers = generate("sudoku6", 800, 0, (0.02, 0.05))[1]
    assert 30 <= len(set(answer_class("sudoku6", answers))) <= 49


def test_9x9_questions_have_no_form():
    with pytest.raises(UserError, match="too many symmetries"):
        form("sudoku9", drawn("sudoku9", 1)[0])


def test_puzzles_as_text():
    assert as_text("sudoku4", np.array([1, 2, 3, 4] * 4)) == "\n".join([".123"] * 4)
    assert as_text("maze5", np.array([1, 2, 3, 4, 5] * 5)) == "\n".join(["# SGo"] * 5)


# -- puzzles from text -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["sudoku4", "sudoku6", "sudoku9", "maze7"])
def test_puzzles_are_read_from_every_form_and_their_answers_judged(kind):
    questions, answers, _ = generate(kind, 3, 0)
    n, grids = side(kind), [as_text(kind, row) for row in questions]
    lines = [line for grid in grids for line in [*grid.split("\n"), ""]]
    assert np.array_equal(np.stack(list(read_puzzles(kind, lines))), questions)
    assert np.array_equal(np.stack(list(read_puzzles(kind, [g.replace("\n", "") for g in grids]))), questions)
    if kind in BOXES:
        framed = [f"| {' '.join(line)} |\n" for grid in grids for line in [*grid.replace(".", "0").split("\n"), "-+-"]]
        assert np.array_equal(np.stack(list(read_puzzles(kind, framed))), questions)
    for question, right in zip(questions, answers):
        assert verdict(kind, question, right) == "right"
        wrong = right.copy()
        wrong[-n - 2] = wrong[-n - 2] % 4 + 2
        assert verdict(kind, question, wrong) == f"wrong in 1 of {n * n} cells"


def test_puzzles_without_an_answer_are_called_so():
    (twice,) = read_puzzles("sudoku4", ["11..", "....", "....", "...."])
    assert "no answer" in verdict("sudoku4", twice, twice)
    (open_one,) = read_puzzles("sudoku4", ["." * 16])
    assert "several answers" in verdict("sudoku4", open_one, open_one)
    (walled,) = read_puzzles("maze5", ["#####", "#S#G#", "#####", "#   #", "#####"])
    assert "no answer" in verdict("maze5", walled, walled)
    for rows, part in [("#" * 25, "one S and one G"), ("######S G#     ##########", "needs walls")]:
        with pytest.raises(UserError, match=part):
            list(read_puzzles("maze5", [rows]))
