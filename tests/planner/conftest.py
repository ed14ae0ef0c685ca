"""What tests of the planner share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mkernel.planner import choice


@pytest.fixture
def forget_choices() -> Iterator[Callable[[], None]]:
    """Forgets what the model has chosen, when it is called and after the test, which may change what it chooses by."""

    def forget() -> None:
        for cache in (choice._promised, choice._kept, choice._of_any_height, choice._heights, choice.choose):
            cache.cache_clear()

    yield forget
    forget()
