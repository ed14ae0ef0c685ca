"""Host time that mkernel.torch adds to a call: ``python tests/with_torch/overhead.py [--calls 2000]``.

The ops behind it are replaced by a stand-in that returns a tensor that is there, so that neither a GPU nor a kernel is needed. Prints
microseconds of processor time, the least of several rounds: the stand-in alone, through the op without a gradient, and with one (the
forward pass alone, then with its backward pass, whose local product has 8 x 8 elements).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import mkernel as mk
import mkernel.torch as mkt

ROUNDS = 15


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Microseconds of one call, the least of the rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.thread_time_ns()
        for _ in range(calls):
            call()
        best = min(best, (time.thread_time_ns() - begin) / calls / 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    with mk.init(target="cpu", heap_bytes=1 << 20) as world:
        a, b = (torch.ones(8, 8, dtype=torch.bfloat16) for _ in range(2))
        c = torch.ones(8, 8, dtype=torch.bfloat16)

        def stand_in(a: Any, b: Any, **more: Any) -> Any:
            return c

        names = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce")
        for name in names:
            setattr(mk, name, stand_in)
        alone = microseconds(lambda: stand_in(a, b, world=world), calls)
        print(f"the stand-in alone: {alone:.2f} us")
        weight = b.clone().requires_grad_()
        gradient = torch.ones_like(c)
        for name in names:
            function = getattr(mkt, name)
            with torch.no_grad():
                without = microseconds(lambda f=function: f(a, b, world=world), calls)
                parameter = microseconds(lambda f=function: f(a, weight, world=world), calls)
            forward = microseconds(lambda f=function: f(a, weight, world=world), calls)
            both = microseconds(lambda f=function: f(a, weight, world=world).backward(gradient), calls)
            print(
                f"{name}: over the stand-in, without a gradient {without - alone:.2f} us, of a parameter under no_grad "
                f"{parameter - alone:.2f} us, with a gradient {forward - alone:.2f} us, with its backward pass {both - alone:.2f} us"
            )


if __name__ == "__main__":
    main()
