# PYTHON_ARGCOMPLETE_OK
"""train_recovery_lora.py on several chips, GPUs or CPU processes: the same recovery LoRA, trained faster.

    python scripts/train_recovery_lora_multi.py --model Qwen/Qwen3-0.6B --checkpoint runs/v2_q4/best.pt \\
        --kd-cache-dir caches/wikitext103_L1024_K128 --recovery-r 8 --batch-size 4 --accumulation-steps 8 \\
        --max-steps 1000
    TPU_NUM_DEVICES=2 python scripts/train_recovery_lora_multi.py --config v6e4 --checkpoint runs/v2_q4/best.pt
    python scripts/train_recovery_lora_multi.py --config cpu2 --checkpoint runs/demo/qat/best.pt

Uses all chips or GPUs of this host unless --num-chips says fewer (on a CPU: one process). On a TPU slice run the same
command on every host; for GPUs of several hosts use torchrun. Effective batch = batch size × accumulation × chips; at
the same effective batch the updates see the same rows on any number of chips. The figures in metrics.jsonl cover all
workers. docs/TPU.md is the runbook. Tested with two CPU processes; untested on hardware: TPU, CUDA (make check-hardware
tests them).
"""

from qat_lora.run.command_line import run_variant

if __name__ == "__main__":
    run_variant("train_recovery_lora", "train_recovery_lora_multi", __doc__, num_chips=0)
