"""Imports go one way, heavy packages stay in the one file that needs them, and ``import mkernel`` is light."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mkernel"
FILES = sorted(PACKAGE.rglob("*.py"))

# A part may import parts of lower layers; those of one layer are ignorant of each other.
LAYERS = (
    ("errors", "abi", "typing", "version"),
    ("env",),
    ("planner", "jit", "memory", "transport"),
    ("proxy",),
    ("runtime",),
    ("ops",),
    ("",),  # mkernel itself
    ("tools",),  # what the programs below share
    ("bench",),
    ("cli", "torch"),
    ("__main__",),
)
LAYER = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
# The same inside the runtime, by folder or file: those of one floor are ignorant of each other.
RUNTIME_FLOORS = (
    ("integers",),
    ("arrays", "clock", "closing", "heap", "logs", "options", "pictures", "plan", "progress", "tuning_cache"),
    ("backend", "failure", "trace"),
    ("ranks", "cpu", "cuda", "fabric"),  # how ranks hear each other; the two targets; the network that SMs play
    ("call_errors", "ending", "heap_arrays", "parts", "prepared", "recorder", "traces"),
    ("failure_watch", "opening"),
    ("world",),
    ("current",),
    ("init",),
    ("workers",),
    ("launch",),
)
FLOOR = {room: floor for floor, rooms in enumerate(RUNTIME_FLOORS) for room in rooms}
# What the planner hands to jit: plain data that imports nothing of mkernel (tested below).
CONTRACTS = {"mkernel.jit.spec"}
# Package -> the only files that may import it.
HOMES = {
    "cloudpickle": {"runtime/workers/pickling.py"},
    "mpi4py": {"runtime/ranks/mpi.py"},
    "cuda": {"jit/cache.py", "jit/cuda.py", "memory/driver.py", "runtime/cuda/kernel.py", "cli/probes.py"},
    "torch": {"bench/baselines.py", *(f"torch/{file.name}" for file in (PACKAGE / "torch").glob("*.py"))},
    "cutlass_library": set(),
}


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module that is imported anywhere in a file, lazily or for types only included. ``package`` resolves relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            # `from mkernel import env` imports a module, `from mkernel.env import ALL` a name of one: both are told by the longer path.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def part(module: str) -> str:
    """``mkernel.runtime.world.World`` -> ``runtime``; a name of mkernel itself -> ``""``."""
    name = [*module.split("."), ""][1]
    return name if name in LAYER else ""


def upward(file: str, source: str) -> list[str]:
    """Imports of a file that the layers forbid."""
    here = Path(file).with_suffix("").parts[0]
    here = "" if here == "__init__" else here
    package = ".".join(["mkernel", *Path(file).parent.parts])
    found = []
    for module in imports(ast.parse(source), package):
        if module.split(".")[0] != "mkernel" or module.rpartition(".")[0] in CONTRACTS or module in CONTRACTS:
            continue
        there = part(module)
        if there != here and LAYER[there] >= LAYER[here]:
            found.append(module)
    return found


def upstairs(file: str, source: str) -> list[str]:
    """Imports of a file of the runtime, by its path in there, that the floors forbid."""
    here = Path(file).with_suffix("").parts[0]
    package = ".".join(["mkernel", "runtime", *Path(file).parent.parts])
    found = []
    for module in imports(ast.parse(source), package):
        if module.startswith("mkernel.runtime."):
            there = module.split(".")[2]
            if there != here and FLOOR[there] >= FLOOR[here]:
                found.append(module)
    return found


def module_of(file: Path) -> str:
    """``mkernel/runtime/world.py`` -> ``mkernel.runtime.world``; a package's ``__init__.py`` is the package."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def circle(sources: dict[Path, str]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; empty if there are none.

    All import statements count, inside functions and for types too; a registry that loads modules by their names has none.
    """
    modules = {module_of(file): file for file in sources}

    def file_of(name: str) -> str:
        """The module of ours that holds a name; empty where it is none of ours."""
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for module, file in modules.items():
        names = imports(ast.parse(sources[file]), ".".join(file.parent.parts))
        graph[module] = {there for there in map(file_of, names) if there not in ("", module)}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_part_has_a_layer() -> None:
    parts = {file.relative_to(PACKAGE).with_suffix("").parts[0] for file in FILES} - {"__init__"}
    assert parts <= LAYER.keys()
    assert len(FILES) > 30


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_down(file: Path) -> None:
    assert upward(str(file.relative_to(PACKAGE)), file.read_text()) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("planner/gemm.py", "from mkernel.runtime.world import World"),
        ("planner/gemm.py", "def f():\n    import mkernel.jit.cuda"),
        ("memory/vmm.py", "from mkernel import transport"),
        ("memory/vmm.py", "from ..proxy import engine"),
        ("runtime/world.py", "if TYPE_CHECKING:\n    from mkernel.ops import allgather_gemm"),
        ("errors.py", "from mkernel import env"),
        ("ops/gemm.py", "from mkernel import Split"),
        ("jit/cuda.py", "from ..planner.gemm import GemmTile"),
        ("tools/launcher.py", "from mkernel.bench import stats"),
        ("tools/check.py", "def f():\n    from mkernel.cli import main"),
        ("bench/command.py", "from mkernel.cli.probes import PROBES"),
        ("runtime/init.py", "from mkernel.tools import launcher"),
    ],
)
def test_the_check_sees(file: str, source: str) -> None:
    assert upward(file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("planner/gemm.py", "from mkernel.jit.spec import KernelSpec"),
        ("runtime/world.py", "from mkernel.runtime.heap import Heap\nfrom mkernel import abi, env"),
        ("__init__.py", "from mkernel.ops.allgather_gemm import allgather_gemm"),
        ("cli/main.py", "import mkernel as mk"),
        ("cli/demo.py", "from mkernel.bench.stats import quantile\nfrom mkernel.tools import launcher"),
        ("bench/report.py", "from mkernel.tools.table import format_table"),
    ],
)
def test_the_check_allows(file: str, source: str) -> None:
    assert upward(file, source) == []


RUNTIME = sorted((PACKAGE / "runtime").rglob("*.py"))


def test_every_room_of_the_runtime_has_a_floor() -> None:
    rooms = {file.relative_to(PACKAGE / "runtime").with_suffix("").parts[0] for file in RUNTIME} - {"__init__"}
    assert rooms == FLOOR.keys()


@pytest.mark.parametrize("file", RUNTIME, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_inside_the_runtime_go_down(file: Path) -> None:
    assert upstairs(str(file.relative_to(PACKAGE / "runtime")), file.read_text()) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("arrays/libraries.py", "if TYPE_CHECKING:\n    from mkernel.runtime.backend import Backend"),
        ("cpu/backend.py", "from mkernel.runtime.cuda import streams"),
        ("ranks/control.py", "def f():\n    from ..world import World"),
        ("prepared.py", "from mkernel.runtime.world import World"),
        ("prepared.py", "from mkernel.runtime import recorder"),
    ],
)
def test_the_floors_are_seen(file: str, source: str) -> None:
    assert upstairs(file, source)


def test_no_circle_of_files() -> None:
    assert circle({file.relative_to(ROOT): file.read_text() for file in FILES}) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("runtime/prepared.py", "from mkernel.runtime.world import World"),
        ("runtime/prepared.py", "if TYPE_CHECKING:\n    from mkernel.runtime.world import World"),
        ("runtime/failure.py", "def late():\n    from mkernel.runtime import init"),
        ("runtime/ranks/bootstrap.py", "from .mpi import MpiBootstrap"),
        ("env.py", "import mkernel.runtime.world as world"),
        ("errors.py", "import mkernel"),
    ],
)
def test_a_planted_circle_is_seen(file: str, line: str) -> None:
    sources = {file.relative_to(ROOT): file.read_text() for file in FILES}
    sources[Path("mkernel", file)] += f"\n{line}\n"
    assert module_of(Path("mkernel", file)) in circle(sources)


def test_contracts_import_nothing() -> None:
    for module in CONTRACTS:
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        assert not [name for name in imports(tree, "mkernel.jit") if name.startswith("mkernel")]


def unresolved(source: str) -> list[str]:
    """Imports from mkernel that do not exist, in the programs that a module holds as strings, for ``python -c``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "0" for piece in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        try:
            names = [name for name in imports(ast.parse(text), "") if name.split(".")[0] == "mkernel"] if "import " in text else []
        except SyntaxError:  # prose
            continue
        found += [name for name in names if not _exists(name)]
    return found


def _exists(name: str) -> bool:
    """Whether a module, or a name of a module, is there."""
    parent, _, last = name.rpartition(".")
    try:
        return not parent or importlib.util.find_spec(name) is not None or hasattr(importlib.import_module(parent), last)
    except ModuleNotFoundError:
        return bool(parent) and _exists(parent) and hasattr(importlib.import_module(parent), last)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_programs_in_strings_import_what_there_is(file: Path) -> None:
    assert unresolved(file.read_text()) == []


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        ("import sys; from mkernel.runtime.ranks import mpi; mpi.library()", []),
        ("import mkernel as mk; from mkernel.env import ALL", []),
        ("from mkernel.runtime import mpi; mpi.library()", ["mkernel.runtime.mpi"]),
        ("from mkernel.env import NOTHING", ["mkernel.env.NOTHING"]),
        ("from mkernel.nowhere.at_all import x", ["mkernel.nowhere.at_all.x"]),
        ("import what mkernel needs", []),
    ],
)
def test_the_check_sees_programs(program: str, missing: list[str]) -> None:
    assert unresolved(f"run([python, '-c', {program!r}])") == missing


@pytest.mark.parametrize("package", HOMES)
def test_heavy_packages_stay_at_home(package: str) -> None:
    assert _users(package) <= HOMES[package]


def _users(package: str) -> set[str]:
    """Files that import a package."""
    return {
        str(f.relative_to(PACKAGE)) for f in FILES for name in imports(ast.parse(f.read_text()), "mkernel") if name.split(".")[0] == package
    }


def test_pyverbs_stays_behind_its_boundary() -> None:
    home = "transport/verbs/pyverbs.py"
    assert _users("pyverbs") == {home, "transport/verbs/classic.py"}
    assert {str(f.relative_to(PACKAGE)) for f in FILES if 'import_module("pyverbs' in f.read_text()} == {home}


def test_one_file_manages_virtual_memory() -> None:
    calls = (
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
    )
    users = {str(f.relative_to(PACKAGE)) for f in FILES if any(call in f.read_text() for call in calls)}
    assert users == {"memory/vmm.py"}


def test_no_nvlink_multicast_and_no_managed_memory() -> None:
    sources = [*FILES, *(file for file in (ROOT / "kernels_src").rglob("*") if file.is_file())]
    for word in ("cuMulticast", "multimem.", "cuMemAllocManaged", "cudaMallocManaged"):
        assert [str(f) for f in sources if word in f.read_text().replace(f"Never {word}", "")] == []


def test_kernels_use_atomics_on_their_own_memory_only() -> None:
    """Flags may lie in host memory, where a GPU's atomics need PCIe atomics. The control block and the data heap never do."""
    own = ("control", "counters(", "&record->")  # the last: a trace, which only its rank's kernels write
    kernels = [file for file in (ROOT / "kernels_src").rglob("*.cuh") if file.name != "ptx.cuh"]
    users = [line for file in kernels for line in file.read_text().splitlines() if "ptx::atomic_" in line or "compare_and_swap" in line]
    assert len(users) >= 4
    assert [line for line in users if not any(word in line.partition("ptx::")[2] for word in own)] == []


def test_importing_mkernel_is_light() -> None:
    heavy = {"cuda", "cupy", "matplotlib", "mpi4py", "pyverbs", "torch"}
    program = (
        "import sys, time; begin = time.process_time(); import mkernel; "
        "print(time.process_time() - begin, *{name.split('.')[0] for name in sys.modules})"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(3)
    ]
    assert "mkernel" in outputs[0].split()
    assert not heavy & set(outputs[0].split())
    assert min(float(output.split()[0]) for output in outputs) < 0.3
