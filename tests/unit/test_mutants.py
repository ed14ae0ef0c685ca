"""The tool that mutates mkernel to test its tests (``make test-mutants``)."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from mkernel.jit.headers import kernels_src
from tests.mutants import device, run
from tests.mutants.generate import Mutation, changes, mutations, sample
from tests.mutants.modules import PACKAGES, checks_of, files_of
from tests.mutants.named import NAMED

ROOT = Path(__file__).parents[2]

_SOURCE = '''
"""A module."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import somewhere

LIMIT = 3

def f(x: int = 1) -> None:
    """Says nothing."""
    log.info("here")
    if x < LIMIT and x != 2:
        g(max(x, 4), flag=True)
    while x: x -= 1
    raise ValueError("3")

class C:
    def m(self) -> int:
        self.n = 5
        return "é" + str(self.n - 1)
'''


def found(kind: str) -> list[tuple[str, str]]:
    return [(m.old, m.new) for m in mutations("x.py", _SOURCE) if m.kind == kind]


def test_what_is_mutated() -> None:
    assert found("condition negated") == [("x < LIMIT and x != 2", "(not (x < LIMIT and x != 2))"), ("x", "(not (x))")]
    assert found("comparison") == [("x < LIMIT", "((x) <= (LIMIT))"), ("x != 2", "((x) == (2))")]
    assert found("and or or") == [("x < LIMIT and x != 2", "((x < LIMIT) or (x != 2))")]
    assert found("call dropped") == [("g(max(x, 4), flag=True)", "pass")], "what is logged is no result"
    assert found("largest or smallest") == [("max", "min")]
    assert found("assignment dropped") == [("self.n = 5", "pass")]
    assert ("True", "False") in found("constant")
    assert ("3", "(3 + 1)") in found("constant")
    assert found("arithmetic") == [("self.n - 1", "((self.n) + (1))")]


def test_named_mutations_are_of_code_that_is_there() -> None:
    """Each by its text, once in its file, and what it becomes is Python."""
    for mutation in NAMED:
        source = (ROOT / mutation.path).read_text()
        compile(run._by_text(mutation, source), mutation.path, "exec")
        assert checks_of(mutation.path)


@pytest.mark.parametrize("package", PACKAGES)
def test_drawn_mutations_change_one_line_and_compile(package: str) -> None:
    for mutation in sample(ROOT, files_of(ROOT, package), 20, 3):
        source = (ROOT / mutation.path).read_text()
        assert changes(mutation, source)
        before, after = source.splitlines(), mutation.apply(source).splitlines()
        assert [i + 1 for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new] == [mutation.line]


def test_mutations_are_drawn_by_the_seed_from_every_kind_and_package() -> None:
    for package in PACKAGES:
        paths = files_of(ROOT, package)
        drawn = sample(ROOT, paths, 24, 5)
        assert drawn == sample(ROOT, paths, 24, 5)
        assert len({(m.path, m.line) for m in drawn}) == 24
        kinds = collections.Counter(m.kind for m in drawn)
        assert len(kinds) >= 6
        assert max(kinds.values()) <= 6
    assert drawn != sample(ROOT, paths, 24, 6)


def test_a_whole_run_makes_at_least_sixty() -> None:
    chosen = run.choose(PACKAGES, run.DRAWN, 0)
    assert len(chosen) >= 60
    assert {mutation.path.split("/")[1] for mutation in chosen} == set(PACKAGES)
    for mutation in chosen:
        assert all((ROOT / test).exists() for test in checks_of(mutation.path)), checks_of(mutation.path)
    assert len({m.kind for m in NAMED}) == len(NAMED), "a name for each"


@pytest.mark.parametrize(
    ("passed", "outcome", "killed"), [(True, "survived", False), (False, "killed", True), (None, "killed: it hangs", True)]
)
def test_a_verdict(tmp_path: Path, passed: bool | None, outcome: str, killed: bool) -> None:
    path = tmp_path / "m.py"
    path.write_text("a = 1\nif a:\n    b = 2\n")
    seen: list[str] = []

    def tests_pass() -> bool | None:
        seen.append(path.read_text())
        return passed

    verdict = run.judge(mutations("m.py", path.read_text())[1], tmp_path, tests_pass)
    assert (verdict.outcome, verdict.killed) == (outcome, killed)
    assert seen == ["a = 1\nif (not (a)):\n    b = 2\n"]
    assert path.read_text() == "a = 1\nif a:\n    b = 2\n"


def test_a_named_mutation_whose_text_is_gone_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mkernel" / "ops").mkdir(parents=True)
    (tmp_path / "mkernel/ops/x.py").write_text("b()\nb()\n")
    gone, twice = (Mutation("mkernel/ops/x.py", 0, 0, old, "pass", old) for old in ("a()", "b()"))
    verdicts = [run.judge(mutation, tmp_path, lambda: False) for mutation in (gone, twice)]
    assert [verdict.outcome for verdict in verdicts] == ["stale"] * 2
    killed = run.Verdict(gone, "killed", 1.0)
    assert run.report([killed] * 4, 1.0) == 0
    assert run.report([*([killed] * 9), verdicts[0]], 1.0) == 1
    assert "STALE" in capsys.readouterr().out


def test_none_of_those_that_are_named_may_survive(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [run.Verdict(mutation, "killed", 1.0) for mutation in NAMED]
    assert run.report(verdicts, 1.0) == 0
    assert run.report([*verdicts[1:], run.Verdict(NAMED[0], "survived", 1.0)], 1.0) == 1
    assert "1 of those that are named were not" in capsys.readouterr().out


@pytest.mark.parametrize(("killed", "of", "status"), [(8, 10, 0), (79, 100, 1), (0, 0, 1)])
def test_four_of_five_are_enough(killed: int, of: int, status: int) -> None:
    mutation = Mutation("mkernel/ops/call.py", 1, 0, "a", "b", "x")
    verdicts = [run.Verdict(mutation, "killed" if i < killed else "survived", 0.0) for i in range(of)]
    assert run.report(verdicts, 1.0) == status


def test_what_has_been_judged_is_not_judged_again_unless_the_file_has_changed(tmp_path: Path) -> None:
    (tmp_path / "mkernel/ops").mkdir(parents=True)
    source = tmp_path / "mkernel/ops/x.py"
    source.write_text("a = 1\n")
    one, other = (Mutation("mkernel/ops/x.py", 1, 4, "1", new, "constant") for new in "23")
    path = tmp_path / "results"
    for results in (run.Results(None), run.Results(path)):
        assert results.find(one, tmp_path) is None
        results.keep(run.Verdict(one, "survived", 2.0), tmp_path)
    assert run.Results(path).find(one, tmp_path) == run.Verdict(one, "survived", 2.0)
    assert run.Results(path).find(other, tmp_path) is None
    source.write_text("a = 1\nb = 2\n")
    assert run.Results(path).find(one, tmp_path) is None


def test_a_tree_is_copied_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    for name in ("mkernel/a.py", ".venv/b.py", "tests/c.py"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("x = 1\n")
    monkeypatch.setattr(run, "ROOT", root)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    copied = run.copy_tree(tmp_path / "copy")
    assert sorted(str(path.relative_to(copied)) for path in copied.rglob("*.py")) == ["mkernel/a.py", "tests/c.py"]


# ---- synchronizations of the device code


def test_every_synchronization_is_a_site_that_calls_of_some_op_reach(tmp_path: Path) -> None:
    found = device.sites(kernels_src())
    assert len(found) > 150
    assert all(site.workloads for site in found)
    text = "ptx::sync_warp();  // all lanes have looked: the loading thread may be a lap ahead of one that has not"
    (site,) = (site for site in found if site.text == text)
    (tmp_path / "tile").mkdir()
    before = (kernels_src() / site.path).read_text()
    (tmp_path / site.path).write_text(before)
    site.leave_out(tmp_path)
    assert before.replace(f"    {text}\n", "\n") == (tmp_path / site.path).read_text()
