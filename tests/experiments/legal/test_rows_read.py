"""Rows of a legal dataset as they are read."""

import json

from qat_lora.experiments.legal.data import legal_rows


def test_columns_that_nothing_is_made_of_are_named_once(tmp_path, capsys):
    rows = [row | {"source": "a book", "checked": True} for row in legal_rows("generated", "train", 4, 0)]
    (tmp_path / "law.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(legal_rows(str(tmp_path / "law.jsonl"), "train", 0, 0)) == 4
    assert capsys.readouterr().out == "ignored columns: jurisdiction, sample_type, source, checked\n"
