"""The notebook of the legal fine-tune runs top to bottom on the CPU."""

import json

from executed import LAW, MINIATURE, executed, outputs


@MINIATURE
def test_it_runs_and_shows_a_table_a_plot_and_an_answer(tmp_path):
    with executed(LAW, tmp_path / "law") as (notebook, out):
        (table,), (plot,) = outputs(notebook, "text/markdown"), outputs(notebook, "image/png")
        assert "| accuracy | " in table and len(plot) > 10_000
        folder = out / "runs" / "notebook-law"
        assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
        asked = next(cell for cell in notebook.cells if cell.id == "ask")
        said = "".join(output.text for output in asked.outputs)
        assert "authorities" in said and f"{folder / 'adapter'} on cpu" in said
