"""The law of KL against tokens."""

import json

import numpy as np
import pytest

from qat_lora.errors import UserError
from qat_lora.run.command_line import parse


@pytest.fixture
def curve(load_script, tmp_path, capsys):
    """curve(lengths, law): what is printed for rows that follow a law, and the picture."""
    bench = load_script("kl_curve")

    def run(lengths, law=lambda tokens: 0.3 + 9.0 * tokens**-0.3):
        def row(method, stage, steps, kl):
            return {"grid": "int2/g64", "method": method, "stage": stage, "steps": steps, "seed": 0,
                    "core_seconds": 10 * steps, "text": {"kl": kl}}  # fmt: skip

        rows = [row("ours", "qat", steps, law(steps * 1024) * factor) for steps in lengths for factor in (0.99, 1.01)]
        rows += [row("gptq", "gptq", 48, 1.4), row("torchao", "qat", 48, 1.1)]
        (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = ["--results", str(tmp_path / "r.jsonl"), "--output", str(tmp_path / "c.png")]
        bench.main(parse(bench.Config, "kl_curve", flags))
        return capsys.readouterr().out, (tmp_path / "c.png").read_bytes()

    return run


def test_a_law_is_recovered_and_predicts(curve):
    said, picture = curve((24, 48, 96, 192, 488, 976))
    found = float(said.split("tokens: ")[1])
    assert found == pytest.approx(0.3 + 9.0 * 1e8**-0.3, rel=0.03) and "from 6 lengths" in said
    assert picture.startswith(b"\x89PNG")


def test_few_lengths_give_a_law_without_a_floor(curve, load_script):
    said, _ = curve((24, 48), lambda tokens: 5 * tokens**-0.2)
    assert "KL = 0.000 + 5 · tokens^-0.200" in said
    tokens = np.array([1e4, 1e5, 1e6])
    assert load_script("kl_curve").fitted(tokens, 5 * tokens**-0.2)(1e7) == pytest.approx(5 * 1e7**-0.2)


def test_one_length_is_refused(curve):
    with pytest.raises(UserError, match="fewer than two --steps of `ours` on int2/g64"):
        curve((48,))
