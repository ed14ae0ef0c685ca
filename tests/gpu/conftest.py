"""A GPU for the tests of this folder."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mkernel.runtime.cuda.backend import CudaBackend


@pytest.fixture
def device() -> Iterator[CudaBackend]:
    from mkernel.runtime.cuda.backend import CudaBackend  # needs packages that machines without a GPU may lack

    device = CudaBackend(0)
    yield device
    device.synchronize()
    device.close()


@pytest.fixture
def kernels_of_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkernel.runtime.cuda import backend as cuda

    include = [Path(__file__).parent / "kernels"]
    monkeypatch.setattr(cuda.compiler, "compile", functools.partial(cuda.compiler.compile, include=include))
