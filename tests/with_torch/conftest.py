"""Eager calls go past torch's dispatcher unless somebody watches: each test draws whether somebody does."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _watched(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    if rng.random() < 0.5:
        library = pytest.importorskip("mkernel.torch.library", reason="torch is not installed: `make test-torch`")
        monkeypatch.setattr(library, "is_watched", lambda: True)
