# PYTHON_ARGCOMPLETE_OK
"""train_qat.py on several chips, GPUs or CPU processes: the same quantisation-aware training (QAT), faster.

    python scripts/train_v2_tpu_multi.py --from-scratch --cache-dir caches/openhermes_L128_K128_N50K --config q4_r32 \\
        --batch-size 8 --accumulation-steps 4 --max-steps 3000
    python scripts/train_v2_tpu_multi.py --v2-checkpoint runs/v2_q4/best.pt --cache-dir caches/text_L256 \\
        --config q4_r32 --num-chips 2

--from-scratch starts from the base model, --v2-checkpoint from another run's student. Uses all chips or GPUs of this
host unless --num-chips says fewer (on a CPU: one process). On a TPU slice run the same command on every host; for GPUs
of several hosts use torchrun. Effective batch = batch size × accumulation × chips; at the same effective batch the
updates see the same rows on any number of chips. The figures in metrics.jsonl cover all workers. docs/TPU.md is the
runbook. Tested with two CPU processes; untested on hardware: TPU, CUDA (make check-hardware tests them).
"""

from qat_lora.errors import UserError
from qat_lora.run.command_line import run_variant


def check(cfg) -> None:
    if not (cfg.from_scratch or cfg.checkpoint):
        raise UserError("give either --from-scratch, to start from the base model, or --checkpoint FILE")


if __name__ == "__main__":
    run_variant("train_qat", "train_v2_tpu_multi", __doc__, check, num_chips=0)
