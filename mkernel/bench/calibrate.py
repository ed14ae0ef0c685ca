"""``python -m mkernel calibrate``: describe this machine for the cost model, from a minute of measurements or from reports there are."""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mkernel import env
from mkernel.bench import command
from mkernel.bench.baselines import ASYNC_TP, NCCL, ONE_SHOT, TWO_SHOT
from mkernel.bench.model_error import Measured, error_table, fit, measured_in
from mkernel.bench.report import ALONE, SOLO, TUNED, Report
from mkernel.planner.machine import Machine, machine_of, save
from mkernel.tools.output import require_writable
from mkernel.tools.table import format_table

__all__ = ["main"]

# What products in a world of one tell, what calls between GPUs tell, and what neither does.
_OF_ONE = ("sm_flops", "sm_load", "memory", "start_lone", "start_early", "tile")
_OF_SEVERAL = ("start", "start_hot", "entry", "flag", "beside", "cta_link", "warps_link", "add")
_LINK, _PAIR = ("link",), ("link_pair",)
_NOT_MEASURED = "slow_after, slow_octave, warm (minutes of work), attention, and the network between nodes"
_PRODUCTS = "1x8192x2048,1x8192x4096,64x2560x8192,512x8192x2048,2048x2048x512,4096x4096x1024,8192x8192x256,8192x8192x2048,2048x2056x2056"
_CALLS = {
    "allgather_gemm": "256x2560x8192,2048x1024x2048,4096x1024x4096,8192x2048x8192",
    "gemm_reduce_scatter": "256x4096x8192,2048x2048x4096,4096x4096x4096,8192x8192x8192",
    "gemm_allreduce": "1x8192x8192,128x8192x8192,4096x4096x4096,8192x8192x8192",
}
_SAMPLES, _COOLDOWN_MS = 5, 10.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mkernel calibrate",
        description="Measure what the cost model needs to know of this machine, in about a minute, and save it for MKERNEL_MACHINE and "
        "`mkernel model --machine`. One rank per GPU.",
    )
    parser.add_argument("--from", dest="folder", type=Path, metavar="FOLDER", help="fit to the reports of `bench` there; needs no GPU")
    parser.add_argument("--out", type=Path, help="where to save it (default: machine.json in MKERNEL_CACHE_DIR)")
    parser.add_argument("--machine", help="what to start from: h100, h200 or a file (default: by the name of the GPU)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of each of the four measurements, at most (default 300)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if a description was saved. Without a GPU this says what would be measured."""
    options = _parser().parse_args(argv)
    out: Path = options.out or env.CACHE_DIR.get() / "machine.json"
    require_writable("--out", out, parents=True)
    if options.folder is not None:
        return _fitted(options.folder, options.machine, out)
    gpus = command.gpus()
    if not gpus:
        print("No GPU: nothing can be measured here, and nothing was saved. On GPUs these would be:")
        print(f"  products in a world of one: {', '.join(_OF_ONE)}")
        print(f"  calls between GPUs: {', '.join((*_OF_SEVERAL, *_LINK, *_PAIR))}")
        print(f"  never: {_NOT_MEASURED}")
        print("`--from FOLDER` fits the same to reports of `mkernel bench`; the cost model assumes an H200 meanwhile.")
        return 1
    with tempfile.TemporaryDirectory(prefix="mkernel-calibrate-") as folder:
        for op, shapes in (("gemm", _PRODUCTS), *(_CALLS.items() if gpus > 1 else ())):
            words = [op, "--shapes", shapes, "--samples", str(_SAMPLES), "--cooldown", str(_COOLDOWN_MS), "--timeout", str(options.timeout)]
            words += ["--world", "1x1" if op == "gemm" else f"1x{gpus}", "--out", str(Path(folder) / f"{op}.json")]
            words += ["--without", TUNED, SOLO, NCCL, ASYNC_TP, ONE_SHOT, TWO_SHOT, ALONE]
            if status := command.main(words):
                return status
        return _fitted(Path(folder), options.machine, out)


def _fitted(folder: Path, start: str | None, out: Path) -> int:
    """Fit a description to the reports of a folder, save it and say what changed. Raises ArgumentError where there is none."""
    rows = measured_in("--from", folder)
    reports = [Report.from_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    device = str(reports[0].machine.get("name", ""))
    before = command.machine_option(start) if start else machine_of(device)
    names = told(rows)
    after = fit(rows, before, names)
    remarks = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "fitted": ", ".join(names),
        "to": f"{len(rows)} times of {', '.join(sorted({report.op for report in reports}))}",
    }
    save(after, out, remarks)
    print(format_table(["field", "before", "fitted"], [[name, _figure(before, name), _figure(after, name)] for name in names]))
    print(f"\nBefore:\n{error_table(rows, before)}\n\nFitted (to these same rows):\n{error_table(rows, after)}\n")
    print(f"Not told by these measurements: {_NOT_MEASURED}{'' if len(names) > len(_OF_ONE) else '; links and flags (one GPU)'}.")
    print(f"Saved: {out}. For the cost model: export MKERNEL_MACHINE={out}")
    return 0


def told(rows: Sequence[Measured]) -> tuple[str, ...]:
    """The fields that these measurements say something of."""
    sizes = {row.ranks for row in rows}
    return (*_OF_ONE, *(_OF_SEVERAL if max(sizes) > 1 else ()), *(_LINK if max(sizes) > 2 else ()), *(_PAIR if 2 in sizes else ()))


def _figure(machine: Machine, name: str) -> str:
    return f"{getattr(machine, name):.4g}"
