"""What ``doctor`` says about networks, on hosts that are made up: every state has a line, every fault a remedy, nothing is a traceback."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mkernel import env
from mkernel.cli import probes
from mkernel.cli.probes import Finding
from mkernel.transport import devices
from tests.transport.test_devices import LINK_LOCAL, MAPPED, Host

FEATURES = {"batched posting (QPEx)": True, "dma-buf (DmaBufMR)": True, "SRD (SRDQPEx)": False}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(devices.find, "__defaults__", (tmp_path,))
    return Host(tmp_path)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``program(pyverbs=..., loopback=...)``: what the probes' programs answer, as (exit status, stdout, stderr)."""

    def install(**answers: tuple[int, str, str]) -> None:
        def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
            name = "loopback" if "loopback" in command[-1] else "pyverbs"
            code, out, error = answers[name]
            return subprocess.CompletedProcess(command, code, out, error)

        monkeypatch.setattr(probes, "_run", run)
        monkeypatch.setattr(probes, "_absent", lambda module: False)

    return install


def look() -> dict[str, Finding]:
    return {finding.subject: finding for finding in probes._verbs()}


def works(**more: Any) -> dict[str, tuple[int, str, str]]:
    return {
        "pyverbs": (0, f"noise\n{json.dumps(['44.0', FEATURES | {'SRD (SRDQPEx)': True}])}\n", ""),
        "loopback": (0, "atomic\n", ""),
        **more,
    }


def test_no_cards_is_no_fault(host: Host) -> None:
    found = look()
    assert found["verbs devices"].detail.startswith("none")
    assert not any(finding.state in ("missing", "broken") for finding in found.values())


def test_a_port_that_works(host: Host, program: Callable[..., None]) -> None:
    host.card("mlx5_0")
    program(**works())
    found = look()
    assert (found["mlx5_0:1"].state, found["mlx5_0:1"].remedy) == ("ok", "")
    assert found["mlx5_0:1"].detail == "Ethernet, active, 400 Gb/sec (4X NDR), for rc, GID 3: 10.78.0.1 (RoCE v2, eth1)"
    assert found["mlx5_0:1 loopback"].detail == "a put arrived (signal: atomic)"
    assert found["pyverbs"].state == "ok"


def test_cards_over_which_puts_are_spread(host: Host, program: Callable[..., None]) -> None:
    host.card("mlx5_0")
    host.card("mlx5_1", rate="100 Gb/sec (4X EDR)")
    program(**works())
    assert not any("cards of rank" in subject for subject in look())
    with env.override(MKERNEL_NIC="mlx5_0,mlx5_0+mlx5_1,mlx5_0+mlx5_5"):
        found = look()
    assert "cards of rank 0 of a host" not in found
    assert found["cards of rank 1 of a host"].detail == "puts of rc are spread by rate: mlx5_0:1 80%, mlx5_1:1 20%"
    assert found["cards of rank 2 of a host"].state == "note"
    assert "mlx5_5" in found["cards of rank 2 of a host"].detail


@pytest.mark.parametrize(
    ("card", "remedy"),
    [
        ({"state": "1: DOWN"}, "cable"),
        ({"gids": []}, "ip address add"),
        ({"gids": [(MAPPED, "IB/RoCE v1")]}, "not routed"),
    ],
)
def test_a_port_that_does_not(host: Host, program: Callable[..., None], card: dict[str, Any], remedy: str) -> None:
    host.card("mlx5_0", **card)
    program(**works())
    port = look()["mlx5_0:1"]
    assert port.state == "note"
    assert remedy in port.remedy


def test_a_loopback_that_fails_says_why(host: Host, program: Callable[..., None]) -> None:
    host.card("mlx5_0")
    program(**works(loopback=(1, "", "Traceback ...\nmkernel.errors.TransportError: rank 0: ENOMEM")))
    finding = look()["mlx5_0:1 loopback"]
    assert (finding.state, finding.detail) == ("note", "mkernel.errors.TransportError: rank 0: ENOMEM")
    assert finding.remedy


def test_efa_ports_have_no_loopback(host: Host, program: Callable[..., None]) -> None:
    host.card("rdmap0", "pci0000:00/0000:00:05.0", driver="efa", link="Unspecified", gids=[(LINK_LOCAL, "")])
    program(**works())
    found = look()
    assert "for srd" in found["rdmap0:1"].detail
    assert "rdmap0:1 loopback" not in found


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ((1, "", "ImportError: libibverbs.so.1: cannot open shared object file"), "cannot be imported: ImportError: libibverbs"),
        ((-11, "", ""), "no message"),
        ((0, json.dumps(["", FEATURES]), ""), "version unknown, without SRD (SRDQPEx)"),
    ],
)
def test_pyverbs(host: Host, program: Callable[..., None], answer: tuple[int, str, str], detail: str) -> None:
    host.card("mlx5_0")
    program(**works(pyverbs=answer))
    found = look()
    assert found["pyverbs"].state == "note"
    assert detail in found["pyverbs"].detail
    assert found["pyverbs"].remedy
    assert ("mlx5_0:1 loopback" in found) == (answer[0] == 0)


def test_gpus_and_cards(host: Host, program: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    bars = "0x0 0xffffff 0x1\n0x1000000000 0x100fffffff 0x2\n0x0 0x0 0x0"
    host.pci("pci0000:00/0000:01:00.0/0000:11:00.0/0000:21:00.0", numa_node="0", resource=bars)
    host.card("mlx5_1", "pci0000:00/0000:01:00.0/0000:11:01.0/0000:31:00.0")
    host.card("mlx5_2", "pci0000:80/0000:81:00.0")
    program(**works())
    monkeypatch.setattr(probes, "_gpu_addresses", lambda: ["0000:21:00.0"])
    monkeypatch.setattr(devices.distance, "__defaults__", (host.root,))
    monkeypatch.setattr(devices.bar_bytes, "__defaults__", (host.root,))
    found = look()
    assert found["GPU 0000:21:00.0"].detail.startswith("nearest: mlx5_1:1 (")
    bar = found["GPU 0000:21:00.0 BAR1"]
    assert (bar.state, bar.detail.split(":")[0]) == ("note", "256 MiB")
    assert "Resizable BAR" in bar.remedy


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.resource, "getrlimit", lambda kind: (64 << 10, 64 << 10))
    monkeypatch.setattr(probes.os, "geteuid", lambda: 1000)
    finding = probes._locked_memory(True)
    assert (finding.state, finding.detail.split(":")[0]) == ("note", "at most 64 KiB")
    assert "ulimit -l unlimited" in finding.remedy
    assert not probes._locked_memory(False).remedy
    monkeypatch.setattr(probes.resource, "getrlimit", lambda kind: (probes.resource.RLIM_INFINITY,) * 2)
    assert probes._locked_memory(True).state == "ok"
