"""Notebooks run top to bottom without a GPU: that of examples/, and the cells of docs/notebooks.md under ipyparallel."""

from __future__ import annotations

import os
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from mkernel.proxy.spawn import without_launcher

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "explore_sm_split.ipynb"


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """For kernels and engines, which are processes of their own."""
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def outputs(notebook: Any) -> tuple[str, list[str]]:
    """What the cells have printed, and their pictures."""
    found = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output["text"] for output in found if output["output_type"] == "stream" and output["name"] == "stdout")
    return text, [output["data"]["image/svg+xml"] for output in found if "image/svg+xml" in output.get("data", {})]


@pytest.mark.usefixtures("without_gpus")
def test_the_notebook_runs_without_a_gpu(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(outputs(notebook)), "committed without outputs"
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text, pictures = outputs(notebook)
    assert "4 ranks on target cpu" in text
    splits = re.findall(r"(?m)^ +(\d+) CTAs push: +([\d.]+) us per call", text)
    assert len(splits) >= 4
    assert all(float(us) > 0 for _, us in splits)
    assert len(re.findall(r"(?m)^ +\d+ +[\d.]+ +[\d.]+ +(?:tensor|load|memory|link|network|start|latency)$", text)) == len(splits)
    assert "most was lost waiting for rank" in text
    assert len(pictures) == 3, "time against split, and two timelines"
    lines = ElementTree.fromstring(pictures[0]).findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(lines) == 2 * len(splits), "measured and predicted"
    assert f"{len(splits) - 1} of {len(splits) - 1} splits" in str(notebook.cells), "the bar has come to its end"


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("without_gpus")
def test_engines_of_ipyparallel_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of docs/notebooks.md: engines under mpiexec, a world that stays open from cell to cell."""
    ipp = pytest.importorskip("ipyparallel")
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    if shutil.which("mpiexec") is None:
        pytest.skip("no mpiexec")
    cells = re.findall(r"```python\n%%px\n(.*?)```", (ROOT / "docs" / "notebooks.md").read_text(), re.DOTALL)
    assert len(cells) == 3, "open, call, begin anew"
    inputs = (
        "import ml_dtypes, numpy as np\n"
        "def my_inputs(world):\n"
        "    a = np.full((32 // world.size, 64), world.rank + 1, ml_dtypes.bfloat16)\n"
        "    return a, np.ones((64, 8), ml_dtypes.bfloat16)\n"
    )
    with ipp.Cluster(engines="mpi", n=2) as engines:
        ranks = engines[:]
        ranks.block = True
        ranks.execute(inputs)
        for cell in (cells[0], cells[1], cells[2], cells[1]):
            ranks.execute(cell)
        assert sorted(ranks["world.rank"]) == [0, 1]
        ranks.execute("column = c[:, 0].astype('float32')")  # bfloat16 does not travel
        assert [column.tolist() for column in ranks["column"]] == [[64.0] * 16 + [128.0] * 16] * 2
        ranks.execute("world.close()")
