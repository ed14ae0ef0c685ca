"""A GPU for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
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
