"""The environment's switches: declared once, typed, read live."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mkernel import env
from mkernel.errors import ArgumentError

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
