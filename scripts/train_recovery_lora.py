"""How much of the loss can a few adapter weights win back? A LoRA on a frozen low-bit student.

    python scripts/train_recovery_lora.py --checkpoint runs/v2_q4/best.pt --kd-cache-dir caches/text_L256
    python scripts/train_recovery_lora.py --tpu --model Qwen/Qwen3-0.6B --checkpoint runs/v2_q4/best.pt \\
        --kd-cache-dir caches/wikitext103_L1024_K128 --recovery-r 8 --batch-size 4 --accumulation-steps 8
    PJRT_DEVICE=TPU python scripts/train_recovery_lora.py --v2-checkpoint runs/v2_q4/best.pt --mode recover

--mode kd learns from a KD cache; sft from chat rows, completions only; recover from plain text. --anchor-weight adds
a KL to what the student said before it had an adapter. metrics.jsonl: loss (cross-entropy against the target, anchor
included), kl (kd without an anchor: loss minus the teacher's entropy), grad_norm, lr, tokens, tokens_per_s. The adapter
of the best held-out figure is kept in adapter/, in PEFT's own format. Untested on hardware: TPU, CUDA.
"""

from qat_lora.experiments.recovery import Config, main
from qat_lora.run.config import run_script

if __name__ == "__main__":
    run_script(main, Config, "train_recovery_lora", __doc__)
