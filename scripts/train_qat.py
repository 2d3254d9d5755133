"""How good can a low-bit student become? Quantisation-aware training from a KD cache; the teacher is never loaded.

    python scripts/train_qat.py --config q2_g32 --cache-dir caches/text_L256 --max-steps 300
    python scripts/train_qat.py --config q2_g32 --cache-dir caches/text_L256 --output-dir runs/q2 --resume auto
    python scripts/train_qat.py --config q2_g32 --cache-dir caches/text_L256 --v2-checkpoint runs/q2/best.pt

Stages: start (--init rtn, mse or gptq) → layer by layer (--layer-steps updates a block) → end to end (--max-steps) →
scales alone (--scale-steps). A line in metrics.jsonl every --log-every steps: loss (cross-entropy against the cached
teacher), kl (loss minus the teacher's entropy: what is left to win), grad_norm before clipping, lr, tokens,
tokens_per_s. The state of lowest held-out KL is kept as best.pt: packed codes and scales, for train_recovery_lora.py,
measure_perplexity.py and run_inference.py.
"""

from qat_lora.experiments.qat import Config, main
from qat_lora.run.config import run_script

if __name__ == "__main__":
    run_script(main, Config, "train_qat", __doc__)
