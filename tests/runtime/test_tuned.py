"""Tuned splits on disk."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from mkernel.planner.split import Split
from mkernel.runtime import tuning_cache as tuned
from mkernel.runtime.tuning_cache import TuningKey

PLACE = TuningKey("a GPU", 132, "", "kernels")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MKERNEL_CACHE_DIR", str(tmp_path))
    return tmp_path / "tuned"


def test_what_is_saved_is_found_again() -> None:
    assert tuned.load(PLACE) == {}
    splits = {"problem 1": Split(None, 8, 2, 0), "problem 2": Split(None, 4)}
    for problem, split in splits.items():
        tuned.save(PLACE, problem, split, date="2026-11-22")
    assert tuned.load(PLACE) == splits
    assert tuned.decode(tuned.encode(splits)) == splits
    tuned.save(PLACE, "problem 1", Split(None, 6, 2, 0))
    assert tuned.load(PLACE)["problem 1"] == Split(None, 6, 2, 0)


def test_other_places_have_their_own() -> None:
    tuned.save(PLACE, "problem", Split(None, 8))
    others = [dataclasses.replace(PLACE, **change) for change in ({"device": "B"}, {"sms": 114}, {"transport": "rc"}, {"kernels": "new"})]
    for i, other in enumerate(others):
        assert tuned.load(other) == {}
        tuned.save(other, "problem", Split(None, i))
    assert [tuned.load(other)["problem"].intra_comm for other in (PLACE, *others)] == [8, 0, 1, 2, 3]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"device": "a GPU"}', "SPLIT", "\xff", "[" * 100_000])
def test_a_file_that_is_not_understood_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    tuned.save(PLACE, "good", Split(None, 8))
    path = tuned.save(PLACE, "bad", Split(None, 4))
    assert path is not None
    if text == "SPLIT":
        text = json.dumps(json.loads(path.read_text()) | {"split": {"compute": 1, "intra_comm": "many"}})
    path.write_text(text, encoding="latin1")
    with caplog.at_level(logging.WARNING, "mkernel"):
        assert tuned.load(PLACE) == {"good": Split(None, 8)}
    assert str(path) in caplog.text


@pytest.mark.parametrize("error", [PermissionError("not yours"), RuntimeError("Could not determine home directory.")])
def test_a_folder_that_cannot_be_read_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def glob(path: Path, pattern: str) -> None:
        raise error

    monkeypatch.setattr(Path, "glob", glob)
    with caplog.at_level(logging.WARNING, "mkernel"):
        assert tuned.load(PLACE) == {}
    assert str(error) in caplog.text


def test_what_is_no_better_than_the_default_is_removed() -> None:
    tuned.save(PLACE, "problem", Split(None, 8))
    assert tuned.save(PLACE, "problem", None) is None
    assert tuned.load(PLACE) == {}


def test_a_folder_that_cannot_be_written_costs_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("not a folder")
    with caplog.at_level(logging.WARNING, "mkernel"):
        assert tuned.save(PLACE, "problem", Split(None, 8)) is None
        assert tuned.load(PLACE) == {}
    assert "MKERNEL_CACHE_DIR" in caplog.text
