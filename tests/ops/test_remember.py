"""What ops remember between calls is bounded, and the oldest of it goes first."""

from __future__ import annotations

import types
from collections import OrderedDict
from typing import Any

from mkernel.ops import call


def test_the_oldest_is_forgotten_first() -> None:
    """One new call too many costs one old one, and what is prepared again counts as new."""
    world: Any = types.SimpleNamespace(bound_calls=OrderedDict())
    bound, most = world.bound_calls, call._MAX_BOUND
    for i in range(most):
        assert call.remember(world, (i,), i) == i
    assert list(bound) == [(i,) for i in range(most)]
    call.remember(world, (0,), "again")
    assert len(bound) == most, "it takes nobody's place"
    call.remember(world, ("new",), "new")
    assert len(bound) == most
    assert (1,) not in bound
    assert list(bound.items())[-3:] == [((most - 1,), most - 1), ((0,), "again"), (("new",), "new")]
