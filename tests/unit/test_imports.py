"""Imports go one way, heavy packages stay in the one file that needs them, and ``import mkernel`` is light."""

from __future__ import annotations

import ast
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
    ("errors", "abi", "version"),
    ("env",),
    ("plan", "jit", "memory", "transport"),
    ("proxy",),
    ("runtime",),
    ("ops",),
    ("",),  # mkernel itself
)
PROGRAMS = {"bench", "cli", "__main__"}  # stand on top of everything, and may share their tools
LAYER = {part: layer for layer, parts in enumerate(LAYERS) for part in parts} | dict.fromkeys(PROGRAMS, len(LAYERS))
# What plan hands to jit: plain data that imports nothing of mkernel (tested below).
CONTRACTS = {"mkernel.jit.spec"}
# Package -> the only files that may import it.
HOMES = {
    "cloudpickle": {"runtime/workers/pickling.py"},
    "mpi4py": {"runtime/mpi.py"},
    "cuda": {"jit/cache.py", "jit/cuda.py", "memory/driver.py", "runtime/cuda.py", "cli/probes.py"},
    "torch": {"bench/libraries.py"},
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
        if there != here and not {here, there} <= PROGRAMS and LAYER[there] >= LAYER[here]:
            found.append(module)
    return found


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
        ("plan/gemm.py", "from mkernel.runtime.world import World"),
        ("plan/gemm.py", "def f():\n    import mkernel.jit.cuda"),
        ("memory/vmm.py", "from mkernel import transport"),
        ("memory/vmm.py", "from ..proxy import engine"),
        ("runtime/world.py", "if TYPE_CHECKING:\n    from mkernel.ops import allgather_gemm"),
        ("errors.py", "from mkernel import env"),
        ("ops/gemm.py", "from mkernel import Split"),
        ("jit/cuda.py", "from ..plan.gemm import GemmTile"),
    ],
)
def test_the_check_sees(file: str, source: str) -> None:
    assert upward(file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("plan/gemm.py", "from mkernel.jit.spec import KernelSpec"),
        ("runtime/world.py", "from mkernel.runtime.heap import Heap\nfrom mkernel import abi, env"),
        ("__init__.py", "from mkernel.ops.allgather_gemm import allgather_gemm"),
        ("cli/main.py", "import mkernel as mk"),
    ],
)
def test_the_check_allows(file: str, source: str) -> None:
    assert upward(file, source) == []


def test_contracts_import_nothing() -> None:
    for module in CONTRACTS:
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        assert not [name for name in imports(tree, "mkernel.jit") if name.startswith("mkernel")]


@pytest.mark.parametrize("package", HOMES)
def test_heavy_packages_stay_at_home(package: str) -> None:
    assert _users(package) <= HOMES[package]


def _users(package: str) -> set[str]:
    """Files that import a package."""
    return {
        str(f.relative_to(PACKAGE)) for f in FILES for name in imports(ast.parse(f.read_text()), "mkernel") if name.split(".")[0] == package
    }


def test_pyverbs_stays_behind_its_boundary() -> None:
    assert _users("pyverbs") == {"transport/verbs.py"}
    assert [str(f) for f in FILES if 'import_module("pyverbs' in f.read_text() and f.name != "verbs.py"] == []


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
    """Flags may lie in host memory, where a GPU's atomics need PCIe atomics."""
    kernels = [file for file in (ROOT / "kernels_src").glob("*.cuh") if file.name != "ptx.cuh"]
    users = [line for file in kernels for line in file.read_text().splitlines() if "ptx::atomic_" in line or "compare_and_swap" in line]
    assert len(users) >= 4
    assert [line for line in users if "control" not in line.partition("ptx::")[2]] == []


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
