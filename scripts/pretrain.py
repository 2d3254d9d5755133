"""Can a network of a few hundred thousand weights reason by going over its answer again and again? (Athena v2)

    python pretrain.py
    python pretrain.py device_type=cpu
    python pretrain.py device_type=tpu global_batch_size=1024
    python scripts/pretrain.py --config nano --resume auto
    python scripts/pretrain.py --config cfg_pretrain_tpu arch.use_gradient_checkpointing=true

A tiny recursive model (arXiv 2510.04871) learns Sudoku, mazes or prompt → response rows: two blocks, applied dozens of
times to a latent answer, with a loss after every segment and a head that says when to stop. An update is one segment of
a batch whose rows are replaced as they end, in fixed shapes, so that XLA compiles one graph. All chips or GPUs of this
host, or those of torchrun; --config is cfg_pretrain unless given.

metrics.jsonl: loss (stablemax cross-entropy, and half the halting head's), exact and segments of the rows that ended,
grad_norm, lr, tokens_per_s; held-out exact, cells, loss and segments, where the head stops and (_full) after all
segments, of the moving average. The run directory also gets best.pt, solved.png and the curves.
docs/athena.md says what to expect. Untested on hardware: TPU, CUDA.
"""

from qat_lora.experiments.athena import Config, main
from qat_lora.run.config import run_script

if __name__ == "__main__":
    run_script(main, Config, "pretrain", __doc__)
