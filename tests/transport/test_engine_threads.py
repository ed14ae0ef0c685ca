"""The compiled engine under ThreadSanitizer: producers, consumers and cards meet only through it (engine_threads.hpp)."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from mkernel.jit.cpu import find_compiler
from tests.sanitizer import at_fixed_addresses, libtsan
from tests.transport.compiled_bugs import KERNELS, Bug, planted

RACE = "ThreadSanitizer: data race"
BUGS = (
    Bug("flag_without_release", "card.hpp", "value, __ATOMIC_RELEASE);", "value, __ATOMIC_RELAXED);", RACE),
    Bug("credits_without_release", "ring.hpp", "completed_, __ATOMIC_RELEASE);", "completed_, __ATOMIC_RELAXED);", RACE),
    Bug("command_without_acquire", "ring.hpp", "ticket, __ATOMIC_ACQUIRE)", "ticket, __ATOMIC_RELAXED)", RACE),
    Bug("credit_before_the_last_write", "srd.hpp", "if (--job->pending != 0)", "if (--job->pending > 1)", f"{RACE}|trouble|visible before"),
    Bug(
        "flag_before_all_writes",
        "counting.hpp",
        "if (!put.announced || put.came != put.writes) return true;",
        "if (!put.announced) return true;",
        f"{RACE}|trouble|visible before",
    ),
)


STRIPED = (
    Bug(
        "flags_do_not_wait",
        "striped.hpp",
        "if (job.parts != job.on[flow.home]) return true;",
        "",
        f"{RACE}|trouble|visible before",
    ),
    Bug(
        "credit_at_post",
        "striped.hpp",
        "    job.bytes_left = put.bytes;\n",
        "    job.bytes_left = put.bytes;\n    job.ended = credits_.complete(put.ticket);\n",
        f"{RACE}|trouble|visible before",
    ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    said: str


def run(program: str, bug: Bug | None, folder: Path, seed: int) -> Outcome:
    """A few thousand puts each way; the program ends at the first race."""
    libtsan()
    shutil.copytree(KERNELS / "proxy", folder / "proxy")
    if bug is not None:
        (folder / "proxy" / bug.file).write_text(planted(bug))
    source = Path(__file__).with_name(f"{program}_threads.cpp")
    flags = ("-std=c++20", "-O1", "-g", "-w", "-pthread", "-fsanitize=thread", f"-I{folder / 'proxy'}", f"-I{KERNELS}")
    subprocess.run([*find_compiler(), *flags, str(source), "-o", str(folder / "threads")], check=True)
    command = at_fixed_addresses([str(folder / "threads"), str(seed)])
    environment = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return Outcome(done.returncode, done.stdout + done.stderr)


@pytest.mark.tsan
@pytest.mark.parametrize("program", ["srd", "striped"])
@pytest.mark.drawn(1)
def test_no_races(program: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    outcome = run(program, None, tmp_path, pytestconfig.getoption("--seed") % 2**31)
    assert outcome == Outcome(0, "all puts came\n"), outcome.said[:5000]


@pytest.mark.slow
@pytest.mark.tsan
@pytest.mark.parametrize("bug", (*BUGS, *STRIPED), ids=lambda bug: bug.name)
def test_what_the_engine_must_order(bug: Bug, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    outcome = run("striped" if bug in STRIPED else "srd", bug, tmp_path, pytestconfig.getoption("--seed") % 2**31)
    assert outcome.code != 0, "no race"
    assert any(word in outcome.said for word in bug.message.split("|")), outcome.said[:3000]
