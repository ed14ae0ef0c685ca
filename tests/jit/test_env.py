"""The environment's switches: declared once, typed, read live."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import env
from mkernel.errors import ArgumentError
from mkernel.runtime.options import Options

ROOT = Path(__file__).parents[2]
READS = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()\s*["'](MKERNEL_\w+)["']""")


def test_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKERNEL_CPU_SEED", raising=False)
    assert env.CPU_SEED.get() == 0
    monkeypatch.setenv("MKERNEL_CPU_SEED", "7")
    assert env.CPU_SEED.get() == 7


def test_empty_means_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_CPU_SMS", " ")
    assert env.CPU_SMS.get() == 4
    assert not env.CPU_SMS.is_set()


@pytest.mark.parametrize(("text", "value"), [("512M", 512 << 20), ("8G", 8 << 30), ("8GiB", 8 << 30), ("1.5k", 1536), ("4096", 4096)])
def test_sizes(monkeypatch: pytest.MonkeyPatch, text: str, value: int) -> None:
    monkeypatch.setenv("MKERNEL_HEAP_BYTES", text)
    assert env.HEAP_BYTES.get() == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MKERNEL_HEAP_BYTES", "much"),
        ("MKERNEL_HEAP_BYTES", "-1G"),
        ("MKERNEL_CPU_SMS", "0"),
        ("MKERNEL_TIMEOUT", "-3"),
        ("MKERNEL_TIMEOUT", "nan"),
        ("MKERNEL_NO_COMPILE", "maybe"),
        ("MKERNEL_TRANSPORT", "carrier pigeon"),
        ("MKERNEL_RANK", "1.5"),
    ],
)
def test_a_bad_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError, match=name) as caught:
        env.ALL[name].get()
    assert repr(text) in str(caught.value)


def test_defaults_parse_and_help_is_one_line() -> None:
    assert len(env.ALL) >= 19
    for name, variable in env.ALL.items():
        assert re.fullmatch(r"MKERNEL_[A-Z_]+", name)
        assert variable.kind
        assert 10 < len(variable.help) < 120
        assert "\n" not in variable.help


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MKERNEL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.CACHE_DIR.get() == tmp_path / "mkernel"


def test_override_puts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_CPU_SEED", "1")
    monkeypatch.delenv("MKERNEL_RANK", raising=False)
    with env.override(MKERNEL_CPU_SEED=2, MKERNEL_RANK=3):
        assert (env.CPU_SEED.get(), env.RANK.get()) == (2, 3)
    assert (env.CPU_SEED.get(), env.RANK.get()) == (1, None)
    with pytest.raises(KeyError, match="MKERNEL_TYPO"), env.override(MKERNEL_TYPO=1):
        pass


def test_no_file_reads_a_variable_itself() -> None:
    """Every read goes through env.py, and what is read is declared."""
    files = [file for file in (ROOT / "mkernel").rglob("*.py") if file.name != "env.py"]
    assert len(files) > 20
    assert {str(file): names for file in files if (names := READS.findall(file.read_text()))} == {}
    assert READS.findall('os.environ.get("MKERNEL_RANK")') == ["MKERNEL_RANK"]


# ---- odd values

_ODD = [
    *(
        "inf",
        "-inf",
        "nan",
        "infG",
        "nanK",
        "1e400",
        "1e400G",
        "-1",
        "-0.5",
        "1.5",
        "1e-400",
        "0x10",
        "²",
        "٣",
        "1 2",
        "--",
        "1,",
        ",",
        ",,",
        "1KM",
    ),
    *(
        "G",
        "B",
        "iB",
        "1" + "0" * 30,
        "9" * 5000,
        "1e30",
        "~no-such-user/x",
        "'",
        '"x',
        "''",
        "()",
        "%s",
        "{}",
        "\x01",
        "\udcff",
        "😀",
        "host:",
        ":1",
    ),
    *("host:99999999999", "host:²", "host:-1", "[::1]:1", "a:b:1", "none", "None", "null", "auto ", "rc,srd", "yes no", "tRuE", "\t", "~"),
]
# What no number, switch, list of choices or address can be. Paths and names may be called anything.
_NONSENSE = ["--", "'", "{}", "\x01", "😀", "none", "yes no", "()"]
_FREE = {"a path", "device or device:port, by comma", "an address"}


def _get(name: str) -> Any:
    """The value, or None after the one error there may be."""
    try:
        return env.ALL[name].get()
    except ArgumentError as error:
        assert name in str(error)
        assert "\n" not in str(error).strip()
        return None


@pytest.mark.parametrize("name", env.ALL)
def test_odd_values_are_values_or_argument_errors(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, name: str) -> None:
    letters = list("0123456789.eE+-infNaGgKMTb:,/~'\" x²\udcff")
    texts = _ODD + ["".join(rng.choice(letters, int(rng.integers(1, 12)))) for _ in range(300)]
    for text in texts:
        monkeypatch.setenv(name, text)
        value = _get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            assert 0 <= value < 2**64
            assert isinstance(value, type(env.ALL[name].get()))
    for text in _NONSENSE if env.ALL[name].kind not in _FREE and not env.ALL[name].secret else []:
        monkeypatch.setenv(name, text)
        if (name, text) not in _SENSE:
            with pytest.raises(ArgumentError, match=name):
                env.check_all()


# Commands are looked for when a compiler is needed.
_SENSE = {("MKERNEL_CXX", text) for text in _NONSENSE if text != "'"} | {("MKERNEL_SPECIALIZE", "none"), ("MKERNEL_OPS", "none")}


@pytest.mark.parametrize(
    "name", ["MKERNEL_TIMEOUT", "MKERNEL_ENTRY_TIMEOUT", "MKERNEL_HEAP_BYTES", "MKERNEL_RANKS_PER_NODE", "MKERNEL_MAX_SMS"]
)
def test_what_a_variable_may_be_init_takes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Else the error would name an argument that nobody gave."""
    for text in [*_ODD, "0", "1", "1e9", "1e-9", "999999999"]:
        monkeypatch.setenv(name, text)
        try:
            Options.resolve()
        except ArgumentError as error:
            assert name in str(error), text


def test_init_reads_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that this world has no use for: a wrong value must not wait for the day on which it counts."""
    import mkernel as mk

    monkeypatch.setenv("MKERNEL_GID_INDEX", "first")
    with pytest.raises(ArgumentError, match="MKERNEL_GID_INDEX"):
        mk.init(target="cpu")
    with pytest.raises(ArgumentError, match="MKERNEL_GID_INDEX"):
        mk.launch(lambda world: None, ranks=1, target="cpu")


def test_a_variable_that_is_misspelt_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rng: np.random.Generator
) -> None:
    """One letter of a name is missing, doubled or another one; or nothing is like it."""
    for name in rng.permutation(list(env.ALL))[:8]:
        at = int(rng.integers(len("MKERNEL_"), len(name)))
        letter = chr(int(rng.integers(ord("A"), ord("Z") + 1)))
        wrong = name[:at] + str(rng.choice(["", name[at] * 2, letter])) + name[at + 1 :]
        if wrong in env.ALL:
            continue
        monkeypatch.setenv(wrong, "1")
        assert env.ignored().keys() == {wrong}
        caplog.clear()
        for _ in range(2):
            Options.resolve()
        (told,) = [record.getMessage() for record in caplog.records if wrong in record.getMessage()]
        near = env.ignored()[wrong]
        assert near in env.ALL and f"did you mean {near}?" in told
        monkeypatch.delenv(wrong)
    monkeypatch.setenv("MKERNEL_ZZZZZZZZZZZZZZZZZZZZ", "1")
    assert env.ignored() == {"MKERNEL_ZZZZZZZZZZZZZZZZZZZZ": ""}


def test_a_size_without_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a world of one, silently."""
    import mkernel as mk

    for name in ("MKERNEL_RENDEZVOUS", "MKERNEL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKERNEL_SIZE", "2")
    monkeypatch.setenv("MKERNEL_RANK", "0")
    with pytest.raises(ArgumentError, match="MKERNEL_RENDEZVOUS"):
        mk.init(target="cpu")


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MKERNEL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(ArgumentError, match="MKERNEL_CACHE_DIR"):
        env.CACHE_DIR.get()


# ---- MKERNEL_LOG
_LOGGING = """
import logging, sys
from mkernel.runtime import logs
first, second = sys.argv[1:]
if first == "before":
    logging.basicConfig(format="program: %(message)s", level=logging.DEBUG)
logs.set_up()
logs.set_up()
if first == "after":
    logging.basicConfig(format="program: %(message)s", level=logging.DEBUG)
log = logging.getLogger("mkernel")
for level in ("debug", "info", "warning", "error"):
    getattr(log, level)(level)
"""


@pytest.mark.parametrize("program", ["never", "before", "after"])
@pytest.mark.parametrize("level", ["", "debug", "info", "warning", "error"])
def test_the_log_is_shown_once(level: str, program: str) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "MKERNEL_LOG"} | ({"MKERNEL_LOG": level} if level else {})
    done = subprocess.run(
        [sys.executable, "-c", _LOGGING, program, ""], cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    levels = ["debug", "info", "warning", "error"]
    if program == "never":
        shown = levels[levels.index(level or "warning") :]
        assert done.stderr.splitlines() == [f"mkernel {name.upper()}: {name}" if level else name for name in shown]
    else:
        assert done.stderr.splitlines() == [f"program: {name}" for name in levels[levels.index(level or "debug") :]]


def test_the_log_of_a_world(tmp_path: Path) -> None:
    program = "import mkernel as mk; mk.init(target='cpu').close(); import logging; logging.getLogger('mkernel').info('shown')"
    variables = os.environ | {"MKERNEL_LOG": "info", "MKERNEL_CACHE_DIR": os.environ["MKERNEL_CACHE_DIR"]}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
    assert "mkernel INFO: shown" in done.stderr
