"""The programs in examples/ under torchrun, and the examples of docstrings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make test-torch`")

import mkernel.torch as mkt
from tests.runtime.processes import clean_environment, free_port
from tests.unit.test_docstring_examples import examples, run

ROOT = Path(__file__).parents[2]


def finish(name: str, ranks: int, *arguments: str) -> str:
    """What the program prints; it must find its own results right."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    command = [*launcher, f"examples/{name}.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right" in done.stdout
    return done.stdout


def test_training_beside_torchs_tensor_parallelism() -> None:
    shown = finish("torch_tensor_parallel", 2)
    first, *_, last = (line for line in shown.splitlines() if line.startswith("step"))
    losses = [float(line.rpartition(" ")[2]) for line in (first, last)]
    assert losses[1] < losses[0] / 5, "the block learns"
    assert shown.count("median of a step") == 2


def test_serving() -> None:
    shown = finish("torch_serving", 2)
    assert [line.partition(":")[0] for line in shown.splitlines() if line.startswith(("prefill of", "decode of"))] == [
        *("prefill of 18 rows (3 prompts)", "prefill of 18 rows (3 prompts)", "prefill of 17 rows (2 prompts)"),
        *("decode of 1 rows", "decode of 3 rows", "decode of 8 rows"),
    ]


@pytest.mark.parametrize("name", [name for name in mkt.__all__ if examples(getattr(mkt, name).__doc__ or "")])
def test_docstrings(name: str) -> None:
    failed, attempted = run(name, getattr(mkt, name).__doc__)
    assert attempted
    assert not failed
