"""Held-out and text figures equal dense references for any batch size and chunk size."""

import math

import pytest
import torch
import torch.nn.functional as F
from students import student_of

from qat_lora.errors import UserError
from qat_lora.kd.training import heldout_figures, kd_loss
from qat_lora.kernels import tiles
from qat_lora.models.loading import load_model
from qat_lora.quant.student import StudentSpec
from qat_lora.train.evaluation import heldout_nll, text_figures, windows
from qat_lora.train.losses import text_loss

ROWS, LENGTH, V = 6, 16, 512
EVERYTHING = torch.ones(ROWS, LENGTH, dtype=torch.uint8)


@pytest.fixture(scope="module")
def teacher(sharp_model_dir):
    return load_model(str(sharp_model_dir))


@pytest.fixture(scope="module")
def student(sharp_model_dir):
    """A student whose head is quantised too, so that using the latent head would give wrong figures."""
    return student_of(sharp_model_dir, StudentSpec(*["balanced4/g32"] * 3))


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, V, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def up_to(*lengths: int) -> torch.Tensor:
    """A mask [N, L] that keeps the first positions of each row."""
    return (torch.arange(LENGTH) < torch.tensor(lengths).unsqueeze(1)).to(torch.uint8)


@torch.no_grad()
def reference(student, teacher, tokens):
    """(NLL [N, L−1] of each next token, KL(teacher‖student) [N, L]) in fp64."""
    logp, logt = (model(tokens).logits.double().log_softmax(-1) for model in (student, teacher))
    nll = F.nll_loss(logp[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)
    return nll, (logt.exp() * (logt - logp)).sum(-1)


@pytest.fixture(scope="module")
def exact(teacher, tokens):
    """exact(mask [N, L]): a held-out dataset whose targets are the teacher's whole distribution."""
    with torch.no_grad():
        prob = teacher(tokens).logits.softmax(-1)
    index, entropy = torch.arange(V).expand_as(prob), torch.distributions.Categorical(prob).entropy()
    keys = ("tokens", "index", "prob", "entropy", "mask")

    def make(mask=EVERYTHING):
        return [dict(zip(keys, row)) for row in zip(tokens, index, prob, entropy, mask)]

    return make


# -- windows ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [8, 9, 23, 24, 40])
@pytest.mark.parametrize("stride", [1, 3, 4, 7, 8])
def test_every_position_is_scored_once(count, stride):
    tokens, scored = windows(torch.arange(count), 8, stride)
    positions = torch.cat([row[8 - n :] for row, n in zip(tokens, scored)]).tolist()
    end = int(tokens[-1, -1]) + 1
    assert count - end < stride, "only an incomplete last window is left out"
    starts = range(0, end, 8) if stride == 8 else {0}
    assert positions == sorted({*range(end)} - {*starts})


def test_sliding_windows_give_context():
    tokens, scored = windows(torch.arange(20), 8, 4)
    assert tokens[:, 0].tolist() == [0, 4, 8, 12] and scored.tolist() == [7, 4, 4, 4]
    assert len(windows(torch.arange(20), 8, 4, limit=2)[0]) == 2


@pytest.mark.parametrize("stride", [0, 9])
def test_impossible_windows_are_refused(stride):
    with pytest.raises(UserError, match=f"stride={stride} must be from 1 to the window length 8"):
        windows(torch.arange(20), 8, stride)
    with pytest.raises(UserError, match="7 tokens, fewer than one window of 8"):
        windows(torch.arange(7), 8, 8)


# -- text figures -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch_size, stride", [(1, LENGTH), (4, 5), (7, 5)])
def test_text_figures_equal_a_dense_reference(student, teacher, backend, tokens, batch_size, stride, monkeypatch):
    monkeypatch.setattr(tiles, "HEAD_BYTES", 4 * V * 11 * 2)
    rows, scored = windows(tokens.flatten(), LENGTH, stride)
    nll, kl = reference(student, teacher, rows)
    kept = torch.arange(1, LENGTH) >= (LENGTH - scored).unsqueeze(1)
    figures = text_figures(student, rows, scored, backend, batch_size, teacher)
    assert figures["tokens"] == int(kept.sum())
    assert figures["nll"] == pytest.approx(float(nll[kept].mean()), rel=1e-5)
    assert figures["ppl"] == pytest.approx(math.exp(figures["nll"]))
    assert figures["kl"] == pytest.approx(float(kl[:, :-1][kept].mean()), rel=1e-4)
    alone = text_figures(student, rows, scored, backend, batch_size)
    assert alone == pytest.approx({key: figures[key] for key in ("nll", "ppl", "tokens")}, rel=1e-5)  # other blocks


# -- losses of a batch ------------------------------------------------------------------------------------------------
def test_text_loss_covers_only_the_target_tokens(student, teacher, tokens):
    """The original's SFT labels included padding; here the mask is 1 only at the target tokens."""
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.uint8)
    mask[0, 3:6] = mask[2, 9] = mask[3, 0] = 1  # a row's first token cannot be predicted and does not count
    nll, _ = reference(student, teacher, tokens)
    loss = text_loss(student, {"tokens": tokens, "mask": mask})
    assert float(loss.detach()) == pytest.approx(float(torch.cat([nll[0, 2:5], nll[2, 8:9]]).mean()), rel=1e-5)
    half = text_loss(student, {"tokens": tokens, "mask": mask, "total": torch.tensor(8.0)})
    assert float(half.detach()) == pytest.approx(float(loss.detach()) / 2, rel=1e-5)


def test_kd_loss_on_the_whole_vocabulary(student, teacher, exact, tokens):
    mask = up_to(16, 3, 9, 1, 16, 7)
    items = exact(mask)
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    _, kl = reference(student, teacher, tokens)
    wanted = (kl + batch["entropy"].double())[mask.bool()].mean()
    assert float(kd_loss(student, batch).detach()) == pytest.approx(float(wanted), rel=1e-5)


def test_the_text_gets_its_share_of_the_targets(student, teacher, exact, tokens):
    """Except in the last position, whose next token is unknown."""
    mask = up_to(16, 3, 9, 1, 16, 7)
    items = exact(mask)
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    nll, kl = reference(student, teacher, tokens)
    from_teacher = kl + batch["entropy"].double()
    mixed = torch.cat([0.7 * from_teacher[:, :-1] + 0.3 * nll, from_teacher[:, -1:]], 1)
    loss = kd_loss(student, batch, 0.3)
    assert float(loss.detach()) == pytest.approx(float(mixed[mask.bool()].mean()), rel=1e-5)


# -- held-out figures -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows, batch_size, used", [(6, 1, 6), (100, 4, 6), (5, 2, 5), (3, 3, 3), (100, 7, 6)])
def test_heldout_figures_equal_a_dense_reference(student, teacher, backend, exact, tokens, rows, batch_size, used):
    """Also if rows end in padding: a mean of batch means would give short rows more weight."""
    nll, kl = (values[:used] for values in reference(student, teacher, tokens))
    figures = heldout_figures(student, exact(), backend, batch_size, rows)
    assert figures["heldout_rows"] == used
    assert figures["heldout_nll"] == pytest.approx(float(nll.mean()), rel=1e-5)
    assert figures["heldout_ppl"] == pytest.approx(math.exp(float(nll.mean())), rel=1e-4)
    assert figures["heldout_kl"] == pytest.approx(float(kl.mean()), rel=1e-4, abs=1e-5)
    mask = up_to(16, 3, 9, 2, 16, 7)
    padded = heldout_figures(student, exact(mask), backend, batch_size, rows)
    assert padded["heldout_kl"] == pytest.approx(float(kl[mask[:used].bool()].mean()), rel=1e-4)


def test_no_heldout_rows_are_refused(student, backend, exact):
    with pytest.raises(UserError, match="0 held-out rows leave nothing to measure"):
        heldout_figures(student, exact(), backend, 7, 0)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_heldout_nll_is_the_mean_over_kept_tokens(student, teacher, backend, tokens, batch_size):
    mask = up_to(16, 3, 9, 0, 16, 1)
    nll, _ = reference(student, teacher, tokens)
    items = [{"tokens": tokens[i], "mask": mask[i]} for i in range(ROWS)]
    figures = heldout_nll(student, items, backend, batch_size, ROWS)
    assert figures["heldout_nll"] == pytest.approx(float(nll[mask[:, 1:].bool()].mean()), rel=1e-5)
    with pytest.raises(UserError, match="have no target token"):
        heldout_nll(student, items[3:4], backend, 1, 1)


def test_evaluation_does_not_change_the_model(student, backend, exact):
    for training in (True, False):
        student.train(training)
        heldout_figures(student, exact(), backend, 2, 2)
        assert student.training is training
    assert all(p.grad is None for p in student.parameters())
