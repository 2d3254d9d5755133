"""Rows of a legal dataset as they are read."""

import json

from qat_lora.experiments.legal.data import legal_data, legal_rows


def test_columns_that_nothing_is_made_of_are_named_once(tiny_tokenizer, tmp_path):
    rows = [row | {"source": "a book", "checked": True} for row in legal_rows("generated", "train", 8, 0)]
    (tmp_path / "law.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = legal_rows(str(tmp_path / "law.jsonl"), "train", 0, 0)
    data = legal_data(read, tiny_tokenizer, 4096, (1.0,) * 5, 0.3, 2, False)
    assert data.lines()[-1] == "ignored columns: jurisdiction, sample_type, source, checked"
