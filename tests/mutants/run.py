"""``make test-mutants``: how many one-line mutations of the host code do the tests of their module notice? Fails below 80 %.

Mutations are drawn by a seed from all that ``generate.py`` finds in the packages below; those of ``named.py`` come on top: each was once
seen to survive, or is of what matters most, and none may. Tests are run with all of their cases. Every mutation is made in a copy of the
tree, where the tests of its module run until the first failure. A run that takes far longer than without a mutation counts as noticed.

Verdicts are kept in ``--results``: what has been judged is not judged again, unless the mutated file has changed since.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# The checkout is on the path only from here on.
from tests.mutants.generate import Mutation, sample  # noqa: E402
from tests.mutants.modules import PACKAGES, checks_of, files_of  # noqa: E402
from tests.mutants.named import NAMED  # noqa: E402

ENOUGH = 0.8
DRAWN = 12  # of each package


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a mutation: "killed", "killed: it hangs", "survived", or "stale" (of a named one whose text is gone)."""

    mutation: Mutation
    outcome: str
    seconds: float

    @property
    def killed(self) -> bool:
        return self.outcome.startswith("killed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=list(PACKAGES), help="some of " + ", ".join(PACKAGES) + " (default: all)")
    parser.add_argument("--drawn", type=int, default=DRAWN, help="mutations drawn from each package (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once (%(default)s)")
    parser.add_argument("--named-only", action="store_true", help="none is drawn")
    parser.add_argument("--deselect", action="append", default=[], metavar="TEST", help="a test that fails without any mutation")
    parser.add_argument("--results", type=Path, metavar="FILE", help="where verdicts are kept, and looked up")
    parser.add_argument("--list", action="store_true", help="show the mutations and the tests, run nothing")
    options = parser.parse_args()
    chosen = choose(options.packages, 0 if options.named_only else options.drawn, options.seed)
    if options.list:
        for mutation in chosen:
            print(f"{mutation}\n    {' '.join(checks_of(mutation.path))}")
        return 0
    began = time.monotonic()
    verdicts = run_all(chosen, options.jobs, options.deselect, Results(options.results))
    return report(verdicts, time.monotonic() - began)


def choose(packages: Sequence[str], drawn: int, seed: int) -> list[Mutation]:
    """The named mutations of some packages, then those drawn."""
    named = [mutation for mutation in NAMED if mutation.path.split("/")[1] in packages]
    return [*named, *(m for package in packages for m in sample(ROOT, files_of(ROOT, package), drawn, seed))]


def report(verdicts: Sequence[Verdict], seconds: float) -> int:
    """Print what survived, and how many were killed in each package. Exit status 0 only if that is enough, and all named ones were."""
    for verdict in verdicts:
        if not verdict.killed:
            print(f"{verdict.outcome.upper()}  {verdict.mutation}\n    {' '.join(checks_of(verdict.mutation.path))}")
    packages = sorted({verdict.mutation.path.split("/")[1] for verdict in verdicts})
    for package in packages:
        mine = [verdict for verdict in verdicts if verdict.mutation.path.split("/")[1] == package]
        print(f"{package:12} {sum(v.killed for v in mine):4d} of {len(mine):4d} killed")
    killed, named = sum(v.killed for v in verdicts), sum(not v.killed for v in verdicts if v.mutation in NAMED or v.outcome == "stale")
    share = killed / len(verdicts) if verdicts else 0.0
    print(f"{killed} of {len(verdicts)} mutations killed, {100 * share:.0f} % (enough: {100 * ENOUGH:.0f} %), {seconds:.0f} s")
    if named:
        print(f"{named} of those that are named were not: what kills them is no test of their module (modules.py), or there is none")
    return 0 if share >= ENOUGH and not named else 1


class Results:
    """Verdicts of this run and of earlier ones: a line of JSON each in a file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._known[entry["key"]] = entry

    def find(self, mutation: Mutation, root: Path = ROOT) -> Verdict | None:
        entry = self._known.get(self._key(mutation, root))
        return None if entry is None else Verdict(mutation, entry["outcome"], entry["seconds"])

    def keep(self, verdict: Verdict, root: Path = ROOT) -> None:
        entry = {"key": self._key(verdict.mutation, root), "outcome": verdict.outcome, "seconds": round(verdict.seconds, 1)}
        if self._path is not None:
            with self._lock, self._path.open("a") as file:
                file.write(json.dumps(entry | {"mutation": str(verdict.mutation)}) + "\n")

    @staticmethod
    def _key(mutation: Mutation, root: Path) -> str:
        """Changed tests are not seen: begin another file after changing them."""
        text = repr((mutation, checks_of(mutation.path))).encode() + (root / mutation.path).read_bytes()
        return hashlib.sha256(text).hexdigest()


def run_all(chosen: Sequence[Mutation], jobs: int, deselected: Sequence[str], results: Results) -> list[Verdict]:
    """The verdict on each, in the order given; a line of each as soon as it is known."""
    verdicts = {mutation: known for mutation in chosen if (known := results.find(mutation)) is not None}
    todo = [mutation for mutation in chosen if mutation not in verdicts]
    if verdicts:
        print(f"{len(verdicts)} of {len(chosen)} have been judged before", flush=True)
    jobs = max(1, min(jobs, len(todo)))
    with tempfile.TemporaryDirectory(prefix="mkernel-mutants-") as name, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for tree in pool.map(copy_tree, (Path(name, str(job)) for job in range(jobs))):
            trees.put(tree)

        def in_a_tree(tests: tuple[str, ...], limit: float, mutation: Mutation | None = None) -> Verdict | bool | None:
            tree = trees.get()
            try:
                if mutation is None:
                    return run_tests(tree, tests, limit, Path(name, "cache"), deselected)
                return judge(mutation, tree, lambda: run_tests(tree, tests, limit, Path(name, "cache"), deselected))
            finally:
                trees.put(tree)

        limits = _limits(todo, pool, in_a_tree)

        def one(mutation: Mutation) -> None:
            tests = checks_of(mutation.path)
            verdict = in_a_tree(tests, limits[tests], mutation)
            assert isinstance(verdict, Verdict)
            results.keep(verdict)
            verdicts[mutation] = verdict
            print(f"{verdict.outcome:16} {verdict.seconds:5.0f} s  {mutation}", flush=True)

        # The longest first: nobody waits for a single one at the end.
        list(pool.map(one, sorted(todo, key=lambda mutation: -limits[checks_of(mutation.path)])))
    return [verdicts[mutation] for mutation in chosen]


def copy_tree(folder: Path) -> Path:
    """What git knows of this tree, or would know; without git all but what is made."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        made = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", "build", "dist", "shared", "*.egg-info")
        shutil.copytree(ROOT, folder, ignore=made, symlinks=True)
        return folder
    for path in filter(None, listed.stdout.split("\0")):
        if (ROOT / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
    return folder


def judge(mutation: Mutation, tree: Path, tests_pass: Callable[[], bool | None]) -> Verdict:
    """Mutate, test (None: it took too long), put everything back."""
    began, path = time.monotonic(), tree / mutation.path
    source = path.read_text()
    try:
        mutated = mutation.apply(source) if mutation.line else _by_text(mutation, source)
    except LookupError:
        return Verdict(mutation, "stale", 0.0)
    try:
        path.write_text(mutated)
        passed = tests_pass()
    finally:
        path.write_text(source)
    outcome = "killed: it hangs" if passed is None else "survived" if passed else "killed"
    return Verdict(mutation, outcome, time.monotonic() - began)


def _by_text(mutation: Mutation, source: str) -> str:
    """The source with a named mutation, which has no line: its text must be there once."""
    if source.count(mutation.old) != 1:
        raise LookupError(mutation)
    return source.replace(mutation.old, mutation.new)


def _limits(
    chosen: Sequence[Mutation], pool: concurrent.futures.Executor, tested: Callable[[tuple[str, ...], float], object]
) -> dict[tuple[str, ...], float]:
    """Seconds that the tests of each module may take with a mutation: three times what they take without, as busy, and half a minute."""

    def limit(tests: tuple[str, ...]) -> float:
        began = time.monotonic()
        if not tested(tests, 1800.0):
            raise SystemExit(f"without any mutation these tests fail: {' '.join(tests)}")
        took = time.monotonic() - began
        print(f"{took:.0f} s without a mutation: {' '.join(tests)}", flush=True)
        return 3 * took + 30

    groups = list(dict.fromkeys(checks_of(mutation.path) for mutation in chosen))
    return dict(zip(groups, pool.map(limit, groups), strict=True))


def run_tests(tree: Path, tests: Sequence[str], limit: float, cache: Path, deselected: Sequence[str]) -> bool | None:
    """Whether they pass; None if they take longer than ``limit`` seconds."""
    if "tests/jit" in tests:  # they test the cache itself
        cache = Path(tempfile.mkdtemp(dir=tree.parent))
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MKERNEL_CACHE_DIR": str(cache),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu", "--seed", "1"]
    command += ["--full", *tests, *(f"--deselect={test}" for test in deselected)]
    process = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        text = process.communicate(timeout=limit)[0].decode(errors="replace")
        if process.returncode not in (0, 1, 2):  # 1: a test failed; 2: a module of tests could not be imported
            raise SystemExit(f"pytest ended with status {process.returncode}:\n{text}")
        return process.returncode == 0
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
