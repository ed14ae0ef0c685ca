"""What ranks of ``mk.launch`` in worker processes print, log and warn of reaches the caller."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel.runtime.workers import calls
from mkernel.runtime.workers.calls import shutdown
from mkernel.runtime.workers.relay import Lines
from mkernel.runtime.world import World
from tests.runtime.in_workers import SECONDS, run


@pytest.fixture(scope="module", autouse=True)
def end_processes() -> Iterator[None]:
    yield
    shutdown()


def test_output(capsys: pytest.CaptureFixture[str]) -> None:
    def talk(world: World) -> None:
        for turn in range(500):
            print(f"rank {world.rank} line {turn} " + "x" * 200)
        os.write(1, b"by a system call\n")
        ctypes.CDLL(None).puts(b"by C")
        print(f"é to stderr of {world.rank}", file=sys.stderr)
        print("50 %\r100 %", end="")

    run(talk)
    out, err = capsys.readouterr()
    for rank in range(2):
        lines = [line for line in out.splitlines() if line.startswith(f"rank {rank} ")]
        assert lines == [f"rank {rank} line {turn} " + "x" * 200 for turn in range(500)], "in order, and whole"
    assert out.count("by a system call\n") == out.count("by C\n") == out.count("100 %") == 2
    assert sorted(err.splitlines()) == ["é to stderr of 0", "é to stderr of 1"]


def test_lines_stay_whole_however_they_come(rng: np.random.Generator) -> None:
    """From a pipe that is read in the middle of lines, also of many at once."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 18)
    lines, found = Lines(reader, "stdout"), []
    sent = "".join(f"{number} {'é' * int(rng.integers(0, 400))}\n" for number in range(2000)).encode()
    at = 0
    while at < len(sent):
        step = int(rng.integers(1, 1 << 17))
        os.write(writer, sent[at : at + step])
        at += step
        while text := lines.read():
            assert text.endswith("\n")
            found.append(text)
        assert not lines.ended
    os.close(writer)
    found += [lines.drain(), lines.rest()]
    assert lines.ended
    lines.close()
    assert "".join(found) == sent.decode()


def test_output_is_live(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The function waits for its own output to have been seen."""

    def talk(world: World) -> bool:
        print("begun")
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "seen").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return (tmp_path / "seen").exists()

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(run(talk, ranks=1)))
    thread.start()
    deadline, text = time.monotonic() + SECONDS, ""
    while "begun" not in text and time.monotonic() < deadline:
        text += capsys.readouterr().out
        time.sleep(0.01)
    (tmp_path / "seen").touch()
    thread.join()
    assert found == [True]


def test_a_flood_of_output_keeps_to_a_bound(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A caller that prints slowly makes the ranks wait, instead of keeping all they say in memory."""
    from mkernel.runtime.workers import pool, relay

    monkeypatch.setattr(pool, "_BACKLOG", 1 << 16)
    highest, plain = [0], relay.write

    def slow(name: str, text: str) -> None:
        call = calls._pool._call  # type: ignore[union-attr]
        highest[0] = max(highest[0], call.waiting_text if call is not None else 0)
        time.sleep(0.001)
        plain(name, text)

    monkeypatch.setattr(relay, "write", slow)

    def talk(world: World) -> None:
        for _ in range(20_000):
            print("z" * 99)

    run(talk, ranks=1)
    assert capsys.readouterr().out.count("z" * 99) == 20_000
    assert 0 < highest[0] < 1 << 18


class Slow:
    """A result that takes its time, and prints, after all ranks have ended the function."""

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(0.5)
        print("another line")
        return str, ("slow",)


def test_a_last_line_without_an_end_stays_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 has ended with it before rank 1 prints more."""

    def talk(world: World) -> Any:
        if world.rank:
            return Slow()
        print("no end", end="")
        return "quick"

    assert run(talk) == ["quick", "slow"]
    assert capsys.readouterr().out == "another line\nno end"


def test_a_line_without_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    run(lambda world: print("w" * (20 << 20), end=""), ranks=1)
    assert capsys.readouterr().out == "w" * (20 << 20)


def test_log_records(caplog: pytest.LogCaptureFixture) -> None:
    def log(world: World) -> None:
        logger = logging.getLogger("mkernel")
        logger.info("told by %d", world.rank, extra={"world": world})  # what cannot travel stays behind
        logging.getLogger("mkernel.deeper").warning("warned by %d", world.rank)
        try:
            raise ValueError("inside")
        except ValueError:
            logger.exception("caught by %d", world.rank)

    with caplog.at_level(logging.WARNING, "mkernel"):
        run(log)
    assert "told by" not in caplog.text
    assert "ValueError: inside" in caplog.text
    assert sorted(r.getMessage() for r in caplog.records if "warned" in r.getMessage()) == ["warned by 0", "warned by 1"]
    caplog.clear()
    with caplog.at_level(logging.INFO, "mkernel"):
        run(log)
    assert caplog.text.count("told by") == 2


def test_mkernel_log_shows_records_once() -> None:
    program = """
        import logging
        from mkernel.runtime.workers.calls import run_in_workers
        from mkernel.runtime.options import Options
        for _ in range(2):
            options = Options.resolve(target="cpu", heap_bytes=1 << 20)
            run_in_workers(lambda world: logging.getLogger("mkernel").info("told by %d", world.rank), 2, options)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "MKERNEL_LOG": "info"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environment, check=True)
    assert sorted(line for line in done.stderr.splitlines() if "told" in line) == [f"mkernel INFO: told by {rank}" for rank in (0, 0, 1, 1)]


class OwnWarning(UserWarning):
    pass


class StubbornWarning(UserWarning):
    def __reduce__(self) -> Any:
        raise LookupError("cannot travel")


def test_warnings() -> None:
    def warn(world: World) -> str:
        class Hidden(DeprecationWarning):
            pass

        warnings.warn(OwnWarning("look out"), stacklevel=1)
        warnings.warn("of a hidden kind", Hidden, stacklevel=1)
        warnings.warn(StubbornWarning("of a stubborn kind"), stacklevel=1)
        return "done"

    with pytest.warns() as found:
        assert run(warn) == ["done"] * 2
    kinds = {(w.category.__name__, str(w.message)) for w in found}
    assert kinds == {("OwnWarning", "look out"), ("Hidden", "of a hidden kind"), ("UserWarning", "of a stubborn kind")}
    assert all(issubclass(w.category, DeprecationWarning) for w in found if "hidden" in str(w.message))
    assert {w.filename for w in found} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(warn) == ["done"] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OwnWarning, match="look out") as caught:
            run(warn)
        assert "in warn" in str(caught.value.__cause__), "raised where it was given"
    with warnings.catch_warnings(record=True) as once:
        warnings.simplefilter("default")
        run(lambda world: warnings.warn("of all ranks", stacklevel=1))
    assert [str(w.message) for w in once] == ["of all ranks"]
