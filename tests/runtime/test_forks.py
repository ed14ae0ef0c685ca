"""Forked children of ranks (DataLoader workers): they may not use their parent's world, and whatever they do disturbs nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.processes import start

_WORKER = Path(__file__).with_name("fork_worker.py")
_SECONDS = 200.0


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_use_of_the_parents_world_is_refused(target: str) -> None:
    """Also while another thread held the world's locks when the child was made; the calls of the parents stay right."""
    results = start("refused", 2, _SECONDS, _WORKER, TEST_TARGET=target)
    assert [(result.code, result.errors) for result in results] == [(0, "")] * 2
    (idle,), (forking,) = (result.lines for result in results)
    assert idle["right"]
    assert forking["right"]
    said = forking["said"]
    quiet = ("close", "leaving the block", "dying in the block")
    assert {name: text for name, text in said.items() if name in quiet} == dict.fromkeys(quiet, "ended well")
    state = said.pop("state")
    assert state.startswith("Error: True False <mkernel.World rank 1 of 2"), state
    refused = {name: text for name, text in said.items() if name not in quiet}
    assert len(refused) >= 19
    assert {name: text for name, text in refused.items() if not _tells(text)} == {}


def _tells(text: str) -> bool:
    return text.startswith("Error: the world of rank 1 belongs to process") and "this process was forked from" in text


def test_children_end_in_any_way_inside_the_block() -> None:
    results = start("leaves", 2, _SECONDS, _WORKER)
    assert [(result.code, result.errors) for result in results] == [(0, "")] * 2
    for rank, result in enumerate(results):
        assert result.lines == [{"rank": rank, "right": True, "zero": True, "one": True}]


def test_a_child_may_have_a_world_of_its_own() -> None:
    results = start("own_world", 2, _SECONDS, _WORKER)
    assert [(result.code, result.errors) for result in results] == [(0, "")] * 2
    assert [result.lines for result in results] == [[{"rank": rank, "said": "Error: (8, 8) True"}] for rank in range(2)]
