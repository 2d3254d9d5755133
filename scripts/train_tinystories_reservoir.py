"""Can a language model whose memory is random and never trained tell stories? Beside a transformer and a minGRU.

    python scripts/train_tinystories_reservoir.py --config cpu
    python scripts/train_tinystories_reservoir.py --config cpu --model transformer
    python scripts/train_tinystories_reservoir.py --dataset roneneldan/TinyStories --use-tpu

The recurrent part is a fixed reservoir; embedding, mixing and readout are trained. --model transformer and mingru have the
same embedding, blocks and number of trained parameters. SHARED_CONFIG below holds what every field is unless a flag
or a preset says otherwise. With USE_TPU (--use-tpu) a missing TPU is a warning and a GPU or the CPU takes its place;
on TPU the batch is doubled and the learning rate is 1.2 times as large, as config.yaml of the run shows.

metrics.jsonl: loss, grad_norm, tokens_per_s; held-out nll, perplexity and bits a byte, over every held-out token.
The run directory also gets tokenizer.json, model.pt (the best state), samples.txt. docs/reservoir.md says what to expect.
Untested on hardware: TPU, CUDA.
"""

import dataclasses
from dataclasses import dataclass

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.stories import Blocks, load_stories
from qat_lora.experiments.stories import Shape, build, get_device, heldout, on_device, story_loss, tell, trained
from qat_lora.models.reservoir import ReservoirSpec
from qat_lora.qat import Plan, restore, train_plain
from qat_lora.rl.rollout import Sampling
from qat_lora.run.config import RunConfig, option, run_script
from qat_lora.run.rundir import open_run, say
from qat_lora.run.session import Every, Session

SHARED_CONFIG = {
    "USE_TPU": False,
    "dataset": "embedded",
    "max_stories": 10_000,
    "heldout_fraction": 0.05,
    "tokenizer": "auto",
    "vocab_size": 2048,
    "epochs": 3,
    "batch_size": 64,
    "block_size": 128,
    "embedding": 256,
    "blocks": 2,
    "hidden": 512,
    "reservoirs": "diagonal:256",
    "spectral_radius": 0.99,
    "density": 0.1,
    "leak_min": 0.05,
    "leak_max": 1.0,
    "input_scaling": 1.0,
    "heads": 4,
    "dropout": 0.1,
    "learning_rate": 2e-3,
    "warmup_steps": 50,
    "clip_grad_norm": 1.0,
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
}
SAMPLE_TOKENS = 120
BEGINNINGS = ("", "Once upon a time", "The little dog")
