"""Several attempts: where the noise goes, how an answer is picked, and what is measured."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.experiments.athena.attempts import (
    Accuracy,
    Attempts,
    counts_up_to,
    draw_attempts,
    measure_attempts,
    rights,
    run_attempts,
)
from qat_lora.experiments.athena.evaluation import answer, measure, steps
from qat_lora.experiments.athena.model import IGNORE, RecursiveModel, RecursiveSpec
from qat_lora.experiments.athena.rows import draw

CPU = TorchBackend("cpu", "fp32")
SEGMENTS = 3


@pytest.fixture(scope="module")
def rows():
    return draw("sudoku4", 10, 0)


@pytest.fixture(scope="module")
def model(rows):
    torch.manual_seed(0)
    model = RecursiveModel(RecursiveSpec(rows.vocab, rows.length, hidden_size=16, num_heads=2, H_cycles=2, L_cycles=2))
    nn.init.normal_(model.halt_weight, std=3)
    return model.eval()


@pytest.fixture
def batch(rows):
    return rows.batch(np.arange(len(rows)))


def tried(model, batch, count=4, noise=1.0, seed=0) -> Attempts:
    return run_attempts(model, batch, SEGMENTS, count, noise, seed, CPU)


# -- the noise -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count, noise", [(1, 0.0), (1, 0.7), (4, 0.7)])
def test_the_first_attempt_is_the_plain_model_bit_for_bit(model, batch, count, noise):
    plain, _ = answer(model, batch, SEGMENTS, CPU)
    z_H, z_L = (state.expand(len(batch["inputs"]), model.spec.positions, -1) for state in (model.H_init, model.L_init))
    with torch.no_grad():
        for _ in range(SEGMENTS):
            z_H, z_L, _, halt = model(z_H, z_L, batch["inputs"], model.identity[batch["identifiers"]])
    found = tried(model, batch, count, noise)
    assert torch.equal(found.tokens[0], plain.full) and torch.equal(found.halt[0], halt)
    assert found.tokens.shape == (count, *batch["inputs"].shape) and found.halt.shape == (count, len(halt))
    assert count == 1 or (found.halt[1:] != halt).any(1).all()


def test_no_noise_draws_no_random_numbers(model, batch):
    before = torch.get_rng_state()
    list(steps(model, batch, SEGMENTS, CPU))
    assert torch.equal(before, torch.get_rng_state())


def test_every_segment_gets_its_own_gaussian_noise_on_the_answer_state_alone(model, batch):
    given, returned = [], [(model.H_init.expand(10, 17, -1), model.L_init.expand(10, 17, -1))]
    handles = [
        model.register_forward_pre_hook(lambda _, inputs: given.append(inputs[:2])),
        model.register_forward_hook(lambda _, inputs, outputs: returned.append(outputs[:2])),
    ]
    torch.manual_seed(0)
    list(steps(model, batch, 40, CPU, noise=0.3))
    for handle in handles:
        handle.remove()
    assert len(given) == 40
    assert all(torch.equal(now[1], before[1]) for now, before in zip(given, returned))
    noise = torch.stack([now[0] - before[0] for now, before in zip(given, returned)]) / 0.3  # [40, 10, 17, 16]
    assert noise.mean().abs() < 0.01 and noise.std() == pytest.approx(1, abs=0.01)  # of 108,800 values
    assert (noise**4).mean() == pytest.approx(3, abs=0.15)  # uniform noise has 1.8
    flat = noise.flatten(2)
    for one, other in ((flat[1:], flat[:-1]), (flat[:, 1:], flat[:, :-1])):  # segments and rows are independent
        assert (one * other).mean().abs() < 0.02


def test_attempts_depend_on_the_seed_and_not_on_their_number(model, batch):
    found = tried(model, batch, 4)
    again, fewer, other = tried(model, batch, 4), tried(model, batch, 2), tried(model, batch, 4, seed=1)
    assert torch.equal(found.halt, again.halt) and torch.equal(found.tokens, again.tokens)
    assert torch.equal(found.halt[:2], fewer.halt) and torch.equal(found.tokens[:2], fewer.tokens)
    assert torch.equal(found.halt[0], other.halt[0]) and (found.halt[1:] != other.halt[1:]).any(1).all()
    assert len({tuple(attempt.tolist()) for attempt in found.halt}) == 4


# -- picking an answer -----------------------------------------------------------------------------------------------
def test_ties_go_to_the_earliest_attempt():
    tokens = torch.tensor([[1, 1], [2, 2], [3, 3], [2, 2], [3, 3]])[:, None]
    found = Attempts(tokens, torch.tensor([[0.0], [1.0], [1.0], [-1.0], [1.0]]))
    assert [int(found.chosen(k)) for k in range(1, 6)] == [0, 1, 1, 1, 1]
    assert [int(found.majority(k)) for k in range(1, 6)] == [0, 0, 0, 1, 1]
    assert found.votes(5)[:, 0].tolist() == [1, 2, 2, 2, 2]
    labels = torch.tensor([[3, 3]])
    assert [rights(found, labels, k) for k in (2, 3, 5)] == [[0, 0, 0], [0, 0, 1], [0, 0, 1]]
    assert rights(found, torch.tensor([[2, 2]]), 4) == [1, 1, 1]


def test_picks_equal_those_of_a_plain_count():
    """Few answers and few logits, so that ties are frequent."""
    random = np.random.default_rng(0)
    tokens, halt = random.integers(0, 2, (9, 300, 2)), random.integers(0, 4, (9, 300)).astype(np.float32)
    labels = random.integers(0, 2, (300, 2))
    found = Attempts(torch.from_numpy(tokens), torch.from_numpy(halt))
    for k in range(1, 10):
        wanted = [0, 0, 0]
        for row in range(300):
            answers = [tuple(attempt) for attempt in tokens[:k, row].tolist()]
            right, logits = tuple(labels[row].tolist()), halt[:k, row].tolist()
            best = logits.index(max(logits))
            voted = Counter(answers).most_common(1)[0][0]  # among equals the one that was counted first
            assert int(found.chosen(k)[row]) == best and int(found.majority(k)[row]) == answers.index(voted)
            wanted = [w + hit for w, hit in zip(wanted, (answers[best] == right, voted == right, right in answers))]
        assert rights(found, torch.from_numpy(labels), k) == wanted
    assert wanted[2] > wanted[1] > 0 and wanted[2] > wanted[0] > 0


@pytest.mark.parametrize("most, wanted", [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_counts_are_powers_of_two_and_the_last(most, wanted):
    assert counts_up_to(most) == wanted


# -- measuring -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mixed(model, rows):
    """Rows whose labels are partly the model's own answers, with unlabelled cells and an unlabelled row."""
    found, _ = answer(model, rows.batch(np.arange(len(rows))), SEGMENTS, CPU)
    labels = rows.labels.copy()
    labels[::2], labels[2::4, 4:], labels[3] = found.full[::2], IGNORE, IGNORE
    return replace(rows, labels=labels)


@pytest.mark.parametrize("batch_size", [1, 3, 10, 16])
def test_without_noise_every_rule_measures_the_plain_model(model, mixed, batch_size):
    plain = measure(model, mixed, SEGMENTS, batch_size, CPU)["heldout_exact_full"]
    table = measure_attempts(model, mixed, SEGMENTS, batch_size, 3, 0.0, 0, CPU)
    assert table == {k: Accuracy(plain, plain, plain) for k in (1, 2, 3)} and 0 < plain < 1


def test_noisy_attempts_are_measured_at_labelled_cells(model, mixed):
    """A batch with all rows makes the attempts of measure_attempts those of run_attempts with its derived seed."""
    seen = []

    class Seeded(TorchBackend):
        def seed(self, seed: int) -> None:
            seen.append(seed)
            super().seed(seed)

    table = measure_attempts(model, mixed, SEGMENTS, len(mixed), 6, 1.0, 5, Seeded("cpu", "fp32"))
    batch, wanted = mixed.batch(np.arange(len(mixed))), dict.fromkeys(table, (0, 0, 0))
    answers, logits = [[] for _ in range(len(mixed))], [[] for _ in range(len(mixed))]
    for number, seed in enumerate(seen):
        torch.manual_seed(seed)
        *_, last = steps(model, batch, SEGMENTS, CPU, noise=1.0 if number else 0.0)
        for row, asked in enumerate(batch["labels"] != IGNORE):
            answers[row].append(tuple(last.logits[row].argmax(-1)[asked].tolist()))
            logits[row].append(float(last.halt[row]))
    kept = [row for row in range(len(mixed)) if row != 3]
    for k in wanted:
        for row in kept:
            labels = batch["labels"][row]
            right, these = tuple(labels[labels != IGNORE].tolist()), answers[row][:k]
            hits = (these[int(np.argmax(logits[row][:k]))], Counter(these).most_common(1)[0][0])
            hits = [*(hit == right for hit in hits), right in these]
            wanted[k] = tuple(w + hit for w, hit in zip(wanted[k], hits))
    assert len(set(seen)) == len(seen) == 6 and list(table) == [1, 2, 4, 6]
    for k, counts in wanted.items():
        assert table[k] == pytest.approx([count / len(kept) for count in counts])
    assert table[6].any >= table[1].any > 0


def test_batches_get_different_noise(model, rows):
    same = rows.take(np.zeros(4, int))
    halts = []

    class Watching(TorchBackend):
        def to_host(self, state):
            if isinstance(state, tuple):  # it calls itself for each part
                halts.append(state[1])
            return super().to_host(state)

    measure_attempts(model, same, SEGMENTS, 2, 2, 1.0, 0, Watching("cpu", "fp32"))
    plain, noisy, plain_again, noisy_again = halts
    assert torch.equal(plain, plain_again)
    assert len(set(torch.cat([noisy, noisy_again]).tolist())) == 4


def test_the_picture_shows_every_table_and_their_mean(tmp_path):
    one = {k: Accuracy(0.5, 0.5, 0.5 + k / 20) for k in (1, 2, 4)}
    draw_attempts([one], tmp_path / "one.png")
    draw_attempts([one, {k: Accuracy(0.1, 0.2, 0.3) for k in one}], tmp_path / "two.png")
    pictures = [(tmp_path / name).read_bytes() for name in ("one.png", "two.png")]
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in pictures)
    assert pictures[0] != pictures[1]
