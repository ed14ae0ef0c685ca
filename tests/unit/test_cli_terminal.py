"""The command line for people and for programs: ``doctor --json``, completion by the shell, and bars on a terminal only."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mkernel.cli import doctor
from mkernel.cli.main import COMMANDS, main
from mkernel.version import VERSION


# ---- doctor --json
def test_doctor_tells_programs_what_it_tells_people(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == (0 if any(told["targets"].values()) else 1)
    assert (told["version"], told["targets"]["cpu"]) == (VERSION, True)
    assert main(["doctor"]) == status
    shown = capsys.readouterr().out
    assert len(told["findings"]) > 5
    for finding in told["findings"]:
        assert finding["state"] in ("ok", "note", "missing", "broken")
        assert finding["subject"] in shown
        assert set(finding["needed_by"]) <= set(told["targets"])


def test_doctor_names_the_targets_that_are_blocked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = doctor.Finding("missing", "thing", "not there", "get one", ("cpu", "cuda"))
    monkeypatch.setattr(doctor, "PROBES", (("thing", (), lambda: iter([blocked])),))
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["targets"] == {"cuda": False, "cpu": False}
    assert [finding["remedy"] for finding in told["findings"]] == ["get one"]


# ---- completion
_COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p mkernel | sed -E 's/.*-F ([^ ]+).*/\\1/') mkernel "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["d"], {"doctor", "demo"}),
        (["doctor", "--"], {"--json", "--help"}),
        (["bench", "--sw"], {"--sweep"}),
        (["demo", "--target", "c"], {"cuda", "cpu"}),
    ],
)
def test_bash_completes(words: list[str], offered: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "mkernel.bash"
    script.write_text(capsys.readouterr().out)
    command = ["bash", "--norc", "-c", _COMPLETE, "bash", str(script), "mkernel", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert offered <= set(done.stdout.split()), done.stdout + done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_command_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in script] == []


def test_completion_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'mkernel[cli]'" in capsys.readouterr().err


# ---- bars
_BAR = """
import sys, time
from mkernel.runtime import progress
progress.DELAY_SECONDS = 0.05
with progress.steps("counting", 3) as step:
    for _ in range(3):
        step()
        time.sleep(float(sys.argv[1]))
        with progress.steps("inside", 2) as inner:
            inner()
"""
_RELAY = """
import subprocess, sys, time
from mkernel.runtime import progress
progress.DELAY_SECONDS = 0.05
with progress.relayed("waiting") as output:
    code = "import time; print('from [below]', flush=True); time.sleep(float(%r))" % sys.argv[1]
    subprocess.run([sys.executable, "-c", code], stdout=output, stderr=subprocess.STDOUT, check=True)
print("at the end")
"""


def on_terminal(code: str, *arguments: str) -> str:
    """What a program shows on a terminal."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                data = terminal.read(4096)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            shown += data
    assert process.wait(60) == 0, shown.decode()
    return shown.decode()


def test_a_terminal_shows_how_far_it_is() -> None:
    pytest.importorskip("rich")
    shown = on_terminal(_BAR, "0.3")
    assert "counting" in shown
    assert "2/3" in shown
    assert "inside" not in shown, "one bar at a time"


def test_what_is_done_soon_shows_nothing() -> None:
    assert on_terminal(_BAR.replace("0.05", "60"), "0") == ""


def test_lines_of_processes_come_above_the_bar() -> None:
    pytest.importorskip("rich")
    shown = on_terminal(_RELAY, "0.5")
    assert "from [below]" in shown
    assert "waiting" in shown
    assert shown.rindex("at the end") > shown.index("from [below]")


@pytest.mark.parametrize("code", [_BAR, _RELAY])
def test_elsewhere_nothing_is_shown(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code, "0.1"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert done.stdout == ("" if code is _BAR else "from [below]\nat the end\n")


def test_bars_need_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkernel.runtime import progress

    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    assert not progress._can_show()
    with progress.steps("nothing", 1) as step:
        step()
