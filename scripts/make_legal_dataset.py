# PYTHON_ARGCOMPLETE_OK
"""Generate questions on English law whose reasoning, answer and citation can all be checked.

    python scripts/make_legal_dataset.py --count 2000 --output data/law.jsonl
    python scripts/make_legal_dataset.py --count 2000 --seed 1 --output data/law.parquet

Every answer is computed (a date, a sum, a number of weeks) and every citation comes from a closed list, so a wrong
answer and an invented authority can be detected. The columns are those of the dataset rzeraat/law: id, question,
answer, topic, difficulty, case_citation, reasoning ("Step 1: …"), jurisdiction, and sample_type (case_analysis,
educational, client_interaction and statutory, in equal numbers). The law is that of England and Wales in January 2024.
It is not legal advice. train_cot_sft.py trains on such a file (docs/cot-sft.md). --dry-run prints one row.
"""

from dataclasses import dataclass

from qat_lora.experiments.legal.rules import LARGEST_COUNT
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    count: int = opt.data(2000, f"rows to generate, at most {LARGEST_COUNT:,}", at_least=1, at_most=LARGEST_COUNT)
    output: str = opt.run("data/law.jsonl", "new .jsonl or .parquet file to write")


if __name__ == "__main__":
    check_command_line(Config, "make_legal_dataset", __doc__)  # before the imports that take seconds

import io
import json
from collections import Counter
from pathlib import Path

import pyarrow
from pyarrow import parquet

from qat_lora.errors import UserError
from qat_lora.experiments.legal.rules import AUTHORITIES, generate
from qat_lora.run.files import check_new, write_atomically


def main(cfg: Config) -> None:
    path = Path(cfg.output)
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"--output {cfg.output} ends in neither .jsonl nor .parquet; use one of them")
    check_new(path)
    if cfg.dry_run:
        row = next(generate(cfg.count, cfg.seed))
        return print(
            f"{cfg.count:,} rows like this one would go to {path}:\n{json.dumps(row, indent=2, ensure_ascii=False)}"
        )
    rows = list(generate(cfg.count, cfg.seed))
    write_atomically(path, lambda file: file.write(encoded(rows, path.suffix)))
    kinds = Counter(row["sample_type"] for row in rows)
    print(f"{len(rows):,} rows in {path}: {', '.join(f'{count:,} {kind}' for kind, count in kinds.items())}")
    print(f"{len({row['case_citation'] for row in rows})} of {len(AUTHORITIES)} authorities cited")


def encoded(rows: list[dict], suffix: str) -> bytes:
    if suffix == ".jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


if __name__ == "__main__":
    run_script(main, Config, "make_legal_dataset", __doc__)
