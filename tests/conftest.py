"""For every test: ``--full``, ``--seed`` and ``rng``, the ``cases`` marker, and skips that nobody can overlook."""

from __future__ import annotations

import collections
import functools
import os
import secrets
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is loaded: tests, and ranks of a test, run side by side

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import budget
from covering import covering, product

_SEED = "MKERNEL_TEST_SEED"


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that says that a launcher has started this process."""
    from mkernel.proxy.spawn import without_launcher

    for name in os.environ.keys() - without_launcher(os.environ).keys():
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _own_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops from outside the package, which the collection of their tests has registered, are known to their tests only."""
    registry = sys.modules.get("mkernel.ops.op")
    if registry is not None and "small_op" not in request.path.parts:
        for name in registry._registered.keys() - set(registry.BUILT_IN):
            monkeypatch.delitem(registry._registered, name)


_set, _undo = pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo
_PLANNED_WITH = "mkernel.planner", "mkernel.abi"


def _forget_plans() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("mkernel.planner"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _set_and_forget(patch: pytest.MonkeyPatch, target: Any, *arguments: Any, **options: Any) -> None:
    _set(patch, target, *arguments, **options)
    if str(getattr(target, "__name__", target)).startswith(_PLANNED_WITH):
        _forget_plans()
        patch.changes_plans = True  # type: ignore[attr-defined]


def _undo_and_forget(patch: pytest.MonkeyPatch) -> None:
    _undo(patch)
    if vars(patch).pop("changes_plans", False):
        _forget_plans()


# What a test changes in the planner is not hidden by what that remembers, and is not remembered after the test.
pytest.MonkeyPatch.setattr = _set_and_forget  # type: ignore[assignment, method-assign]
pytest.MonkeyPatch.undo = _undo_and_forget  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mkernel")
    group.addoption("--full", action="store_true", help="all threes of values of test axes instead of all pairs, and tests marked slow")
    group.addoption("--products", action="store_true", help="with --full: whole products of test axes")
    group.addoption("--require-vm", action="store_true", help="tests that boot virtual machines fail, not skip, where none can be booted")
    group.addoption("--budget", type=float, default=budget.BUDGET, help="seconds of one core; where tests take longer, some are drawn")
    group.addoption("--write-costs", action="store_true", help="keep what each test took in tests/costs.json")
    group.addoption("--seed", type=int, default=None, help="of the random inputs (default: fresh, printed)")


def pytest_configure(config: pytest.Config) -> None:
    # Started in the background of a script, or by nohup, which ignore these: tests that send them would hang.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    if config.getoption("--seed") is None:  # a worker of pytest-xdist has its parent's, which is printed
        config.option.seed = int(os.environ.setdefault(_SEED, str(secrets.randbelow(2**31))))
    if not os.environ.get("MKERNEL_CACHE_DIR"):
        # The run's own cache, never the user's; set it yourself to keep compiled kernels between runs.
        folder = tempfile.TemporaryDirectory(prefix="mkernel-test-cache-", ignore_cleanup_errors=True)
        os.environ["MKERNEL_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_report_header(config: pytest.Config) -> str:
    return f"mkernel: inputs from --seed {config.getoption('--seed')}, {_cases_of(config)[1]}"


def _cases_of(config: pytest.Config) -> tuple[Callable[..., list[dict[str, Any]]], str]:
    """Which cases of test axes run, and what they are called."""
    cover = functools.partial(covering, seed=config.getoption("--seed"))
    if not config.getoption("--full"):
        return cover, "pairwise coverings of axes"
    if not config.getoption("--products"):
        return functools.partial(cover, strength=3), "coverings of axes by threes"
    return product, "whole products of axes"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("cases")
    if marker is None:
        return
    axes = dict(marker.kwargs)
    valid = axes.pop("valid", None)
    cases = _cases_of(metafunc.config)[0](axes, valid)
    drawn = metafunc.definition.get_closest_marker("drawn")
    if drawn is not None and not metafunc.config.getoption("--full"):
        cases = [cases[at] for at in _draw(metafunc.config, metafunc.definition.nodeid, len(cases), drawn.args[0])]
    names = list(axes)
    values = [tuple(case[name] for name in names) for case in cases]
    ids = ["-".join(f"{name}={_label(case[name])}" for name in names) for case in cases]
    metafunc.parametrize(",".join(names), values if len(names) > 1 else [v[0] for v in values], ids=ids)


def _draw(config: pytest.Config, name: str, count: int, most: int) -> list[int]:
    """Which ``most`` of ``count`` cases of a test this run has: others with every seed, the same on all workers."""
    rng = np.random.default_rng([config.getoption("--seed"), zlib.crc32(name.encode())])
    return sorted(int(at) for at in rng.permutation(count)[:most])


def _label(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value).replace(" ", "")


@pytest.hookimpl(trylast=True)  # of what -k and -m have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {
        "slow": None if config.getoption("--full") else "slow: runs with --full",
        "gpu": None if shutil.which("nvidia-smi") else "gpu: no NVIDIA driver on this machine",
    }
    for item in items:
        for name, reason in skips.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
    if config.getoption("--full"):
        return
    tests: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("drawn") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        for at in set(range(len(cases))) - set(_draw(config, name, len(cases), cases[0].get_closest_marker("drawn").args[0])):
            cases[at].add_marker(pytest.mark.skip(reason=_NOT_DRAWN))
    _keep_the_budget(config, [item for item in items if not item.get_closest_marker("skip")])


_NOT_DRAWN = "not drawn by this seed: runs with --full"


def _keep_the_budget(config: pytest.Config, items: list[pytest.Item]) -> None:
    known, seed = budget.read(), config.getoption("--seed")
    costs = [None if item.get_closest_marker("always") else known.get(budget.function_of(item.nodeid)) for item in items]
    always = sum(known.get(budget.function_of(item.nodeid), 0.0) for item, cost in zip(items, costs, strict=True) if cost is None)
    scale = budget.scale_of(costs, config.getoption("--budget") - always)
    for item, cost in zip(items, costs, strict=True):
        if cost and not budget.is_drawn(item.nodeid, cost, scale, seed):
            item.add_marker(pytest.mark.skip(reason=_NOT_DRAWN))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "skipped":
        _seconds[report.nodeid] += report.duration


_seconds: collections.Counter[str] = collections.Counter()  # of each test that ran, in the process that prints the summary


# marker: how to run what ``-m`` leaves out
_COMMANDS = {"gpu": "`make test-gpu`, on GPUs", "rdma": "`make test-rdma`", "slow": "`make test-full`", "mpi": "leave out -m"}
_left_out = pytest.StashKey[collections.Counter[str]]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        config = item.config
        named = (name for name in _COMMANDS if name in config.option.markexpr and item.get_closest_marker(name))
        marker = next(named, None)
        reason = f"{marker}: left out by -m; {_COMMANDS[marker]}" if marker else "left out by the command line (-k, -m, --deselect)"
        config.stash.setdefault(_left_out, collections.Counter())[reason] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the process that prints the summary what it has left out."""
    if session.config.getoption("--write-costs") and not hasattr(session.config, "workeroutput"):
        budget.write(_seconds_of_functions())
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(_left_out, {}))


def _seconds_of_functions() -> dict[str, list[float]]:
    """What each case that ran took, by function."""
    measured: dict[str, list[float]] = collections.defaultdict(list)
    for nodeid, seconds in _seconds.items():
        measured[budget.function_of(nodeid)].append(seconds)
    return measured


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """All workers collect the same, so that the last one's word is as good as another's."""
    if found := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_left_out] = collections.Counter(found)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What did not run, counted by reason: a suite that silently leaves out what it cannot run looks greener than it is."""
    reasons = config.stash.get(_left_out, collections.Counter()) + collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    )
    if reasons:
        terminalreporter.section(f"NOT RUN: {sum(reasons.values())} tests", sep="!", yellow=True, bold=True)
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:5d}  {reason}")
    outgrown = {} if config.getoption("--full") else budget.outgrown(_seconds_of_functions(), budget.read())
    for name, seconds in outgrown.items():
        terminalreporter.line(f"{name} took {seconds:.0f} s, far more than tests/costs.json says: --write-costs keeps it")
    if terminalreporter.stats.get("failed"):
        terminalreporter.line(f"the same inputs again: --seed {config.getoption('--seed')}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on ``--seed`` and the test alone, not on which tests ran before."""
    return np.random.default_rng([request.config.getoption("--seed"), zlib.crc32(request.node.nodeid.encode())])
