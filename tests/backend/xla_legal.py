"""Checks of packed fine-tuning on torch_xla's CPU device, run by xla_process.py."""

from functools import partial
from itertools import pairwise

from loops import train_plain
from xla_process import CPU, MODEL, OUT, XLA, graphs, on_both

from qat_lora.experiments.legal.data import legal_data, legal_rows, section_weights
from qat_lora.experiments.legal.evaluation import LegalEvaluation
from qat_lora.lora.adapter import save_adapter
from qat_lora.lora.add import add_adapter
from qat_lora.lora.merge import merged
from qat_lora.lora.targets import PROJECTIONS
from qat_lora.models.loading import load_model, load_tokenizer
from qat_lora.rl.sampler import Sampler
from qat_lora.run.session import Every
from qat_lora.train.loop import Plan
from qat_lora.train.supervised import packed_loss


def training(name: str, checkpointing: bool = False, dropout: float = 0.0) -> dict:
    """Four updates of two micro-batches, past the partial batch that ends an epoch. Every second one evaluates held-out
    figures and answers and saves a checkpoint."""
    tokenizer, given, gaps = load_tokenizer(MODEL), [], []
    data = legal_data(legal_rows("generated", "train", 26, 0), tokenizer, 512, section_weights("answer=2"), 0.2, 0)

    def train(backend, session) -> None:
        model = backend.place(add_adapter(load_model(MODEL).requires_grad_(False), 4, 8, PROJECTIONS, 0, dropout))
        if checkpointing:
            backend.gradient_checkpointing(model)
        evaluation = LegalEvaluation(Sampler(tokenizer, backend, (tokenizer.eos_token_id,), 2, 256, 4), data)

        def loss_of(model, batch):
            if backend is XLA:
                given.append(graphs())
            return packed_loss(model, batch)

        plan = Plan(4, 4, 2, 1e-3, 3, 1.0, 0, weight_decay=0.01)
        train_plain(model, data.train, loss_of, plan, session, lambda step: evaluation.glance(model, 4, 3), "sft")
        adapter = OUT / f"{name}-{backend.kind}" / "adapter"
        save_adapter(model, adapter, None)
        gaps.append(merged(model, MODEL, None, adapter, data.train[0]["tokens"], CPU)[1])

    backends = (XLA,) if dropout else (XLA, CPU)  # whose draws differ
    found = on_both(name, train, Every(log=1, evaluate=2, save=2), backends)
    rows = len(data.train), sum(map(bool, data.heldout.rows))
    return found | {"rows": rows, "gaps": gaps, "graphs": [b - a for a, b in pairwise(given)]}


packed = partial(training, "legal")
checkpointed = partial(training, "legal-checkpointed", checkpointing=True)
dropout = partial(training, "legal-dropout", dropout=0.05)
