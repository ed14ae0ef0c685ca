"""A GPU for the tests of this folder."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mkernel.runtime.cuda import CudaDevice


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    from mkernel.runtime.cuda import CudaDevice  # needs packages that machines without a GPU may lack

    device = CudaDevice(0)
    yield device
    device.synchronize()
    device.close()


@pytest.fixture
def kernels_of_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkernel.runtime import cuda

    include = [Path(__file__).parent / "kernels"]
    monkeypatch.setattr(cuda.compiler, "compile", functools.partial(cuda.compiler.compile, include=include))
