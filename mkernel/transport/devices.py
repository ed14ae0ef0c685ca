"""The network cards of this host, read from sysfs: which ports are up, which GID to speak with, which card is near which GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from mkernel import env
from mkernel.errors import ArgumentError
from mkernel.transport import Card

__all__ = [
    "DevicePort",
    "Gid",
    "bar_bytes",
    "cards_for",
    "choose_gid",
    "describe_distance",
    "distance",
    "find",
    "links",
    "local_cpus",
    "pkey_index",
    "problem",
    "usable",
]

SYSFS = Path("/sys")
_ROCE_V2, _ROCE_V1 = "RoCE v2", "IB/RoCE v1"
_PARTITION = 0x7FFF  # bits of a P_Key that name the partition; the other one says full or limited member
_FAR = 1 << 16  # distance of devices that share no PCI root


@dataclasses.dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    address: ipaddress.IPv6Address
    kind: str  # in the words of sysfs: "RoCE v2", "IB/RoCE v1"
    interface: str  # its network interface; empty on InfiniBand

    def __str__(self) -> str:
        mapped = self.address.ipv4_mapped
        return f"{self.index}: {mapped or self.address} ({self.kind}{', ' + self.interface if self.interface else ''})"


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePort:
    """One port of one device."""

    device: str
    port: int
    state: str  # "ACTIVE", "DOWN" ...
    link_layer: str  # "InfiniBand", "Ethernet", "Unspecified" (EFA)
    rate: str  # "400 Gb/sec (4X NDR)"
    driver: str  # "mlx5_core", "efa"; empty for software devices
    path: Path | None  # of the PCI device
    numa: int  # NUMA node; -1: unknown
    gids: tuple[Gid, ...]
    node_type: str = ""  # "CA" (InfiniBand, RoCE), "RNIC" (iWARP), "UNSPECIFIED" (EFA)

    @property
    def iwarp(self) -> bool:
        """Whether the device speaks iWARP, which has neither immediates nor atomics, and connects otherwise."""
        return self.node_type == "RNIC"

    @property
    def gigabits(self) -> float:
        """Its rate in 10^9 bits per second; 0 if unknown."""
        number = self.rate.partition(" ")[0]
        return float(number) if number.replace(".", "", 1).isdigit() else 0.0

    @property
    def active(self) -> bool:
        """Whether the port is up."""
        return self.state == "ACTIVE"

    @property
    def transport(self) -> str:
        """The transport that works over this device: ``"rc"`` or ``"srd"``."""
        return "srd" if self.driver == "efa" else "rc"

    @property
    def name(self) -> str:
        """Device and port, e.g. ``mlx5_0:1``."""
        return f"{self.device}:{self.port}"


def find(root: Path = SYSFS) -> list[DevicePort]:
    """Every port of every RDMA device, in order of name. What cannot be read is left out, or empty; nothing is raised."""
    folder = root / "class/infiniband"
    found = []
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        ports = device / "ports"
        pci = device / "device"
        path = pci.resolve() if pci.exists() else None
        driver = (pci / "driver").resolve().name if (pci / "driver").exists() else ""
        numa, node_type = _text(pci / "numa_node"), _text(device / "node_type").partition(":")[2].strip()
        for port in sorted(ports.iterdir(), key=lambda p: p.name) if ports.is_dir() else ():
            found.append(
                DevicePort(
                    device.name,
                    int(port.name),
                    _text(port / "state").partition(":")[2].strip(),
                    _text(port / "link_layer"),
                    _text(port / "rate"),
                    driver,
                    path,
                    int(numa) if numa.lstrip("-").isdigit() else -1,
                    tuple(_gids(port)),
                    node_type,
                )
            )
    return found


def choose_gid(port: DevicePort) -> Gid | None:
    """The GID to speak with, chosen by its content; None if the port has none.

    On Ethernet RoCE v2 comes before v1, which is not routed; then IPv4 before global IPv6, and that before link-local. On InfiniBand and
    EFA the first GID is taken.
    """
    if port.link_layer != "Ethernet":
        return port.gids[0] if port.gids else None

    def rank(gid: Gid) -> tuple[bool, int, int]:
        reach = 0 if gid.address.ipv4_mapped else 2 if gid.address.is_link_local else 1
        return gid.kind != _ROCE_V2, reach, gid.index

    return min(port.gids, key=rank, default=None)


def usable(name: str, ports: Sequence[DevicePort]) -> list[DevicePort]:
    """Those of the ports over which the transport ``name`` works."""
    return [port for port in ports if port.transport == name and not port.iwarp and port.active and choose_gid(port)]


def links(ports: Sequence[DevicePort]) -> dict[str, float]:
    """The link layers over which ``rc`` can go from this host, of the ports that ``MKERNEL_NIC`` allows, each with its fastest rate."""
    wished = {card for wish in env.NIC.get() or () for card in wish.split("+")}
    found: dict[str, float] = {}
    for port in usable("rc", ports):
        if not wished or port.device in wished or port.name in wished:
            found[port.link_layer] = max(port.gigabits, found.get(port.link_layer, 0.0))
    return found


def problem(name: str, ports: Sequence[DevicePort]) -> str:
    """Why the transport ``name`` cannot be used with these ports, in words; empty if it can."""
    mine = [port for port in ports if port.transport == name]
    if not mine:
        return "no EFA device" if name == "srd" else "no RDMA device"
    if all(port.iwarp for port in mine):
        return f"{mine[0].name} speaks iWARP, and rc needs InfiniBand or RoCE (irdma: load it with roce_ena=1)"
    mine = [port for port in mine if not port.iwarp]
    if not any(port.active for port in mine):
        return "no port is up: " + ", ".join(f"{port.name} is {port.state or 'in an unknown state'}" for port in mine)
    up = [port for port in mine if port.active]
    if not any(map(choose_gid, up)):
        return f"{up[0].name} has no GID (give its network interface an address)"
    return ""


def cards_for(
    name: str, slot: int, gpu: str = "", ports: Sequence[DevicePort] | None = None, root: Path = SYSFS, link: str | None = None
) -> tuple[Card, ...]:
    """The network cards of one of a host's ranks: those that ``MKERNEL_NIC`` names, else the nearest to its GPU, then the fastest.

    Ranks share cards that are equally near and fast in turns. More than one card is taken only where they are named.

    Parameters
    ----------
    name
        ``"rc"`` or ``"srd"``.
    slot
        Number of the rank among those of its host.
    gpu
        PCI address of its GPU, e.g. ``"0000:1b:00.0"``; empty on target cpu.
    link
        The link layer of all ranks; None: any.

    Raises
    ------
    ArgumentError
        No card fits; the message says which there are.
    """
    ports = find(root) if ports is None else ports
    remedy = "see `python -m mkernel doctor`"
    candidates = [port for port in usable(name, ports) if link in (None, port.link_layer)]
    wished = env.NIC.get()
    if wished:
        wishes = wished[slot % len(wished)].split("+")
        chosen = [_best(_named(wish, name, candidates, ports, link), gpu, root) for wish in wishes]
        cards = tuple(_card(best[slot % len(best)], root) for best in chosen)
        if len(set(cards)) < len(cards):
            raise ArgumentError("MKERNEL_NIC", "+".join(wishes), "one port is named twice", "name different ones")
        return cards
    if not candidates and link and not problem(name, ports):
        raise ArgumentError("transport", repr(name), f"no port is {link}, as those of other ranks are", "choose cards with MKERNEL_NIC")
    if not candidates:
        raise ArgumentError("transport", repr(name), problem(name, ports), remedy)
    best = _best(candidates, gpu, root)
    return (_card(best[slot % len(best)], root),)


def _named(wish: str, name: str, candidates: Sequence[DevicePort], ports: Sequence[DevicePort], link: str | None) -> list[DevicePort]:
    """The ports that a word of ``MKERNEL_NIC`` names."""
    named = [port for port in ports if wish in (port.device, port.name)]
    found = [port for port in named if port in candidates]
    if not found:
        there = ", ".join(f"{port.name} ({port.state.lower()})" for port in ports) or "none"
        over = f" over {link}" if link and named else ""
        rule = f"no such port, or it cannot be used for {name}{over}: there are {there}"
        raise ArgumentError("MKERNEL_NIC", wish, rule, "see `python -m mkernel doctor`")
    return found


def _best(candidates: Sequence[DevicePort], gpu: str, root: Path) -> list[DevicePort]:
    """Those that are nearest to the GPU, and of these the fastest."""
    if gpu:
        apart = [distance(gpu, port, root) for port in candidates]
        candidates = [port for port, far in zip(candidates, apart, strict=True) if far == min(apart)]
    fastest = max(port.gigabits for port in candidates)
    return [port for port in candidates if port.gigabits == fastest]


def _card(port: DevicePort, root: Path) -> Card:
    """The port as a card, with the GID and the partition to use."""
    gid = choose_gid(port)
    assert gid is not None
    index = env.GID_INDEX.get()
    if index is not None and index not in {g.index for g in port.gids}:
        there = ", ".join(map(str, port.gids))
        raise ArgumentError("MKERNEL_GID_INDEX", index, f"{port.name} has no such GID: there are {there}", "unset it")
    return Card(port.device, port.port, gid.index if index is None else index, pkey_index(port, root), port.gigabits)


def pkey_index(port: DevicePort, root: Path = SYSFS) -> int:
    """The entry of the port's table of partitions that ``MKERNEL_PKEY`` names; 0 if it is not set. Raises ArgumentError."""
    wished = env.PKEY.get()
    if wished is None:
        return 0
    folder = root / "class/infiniband" / port.device / f"ports/{port.port}/pkeys"
    there: dict[int, int] = {}
    for index in sorted(int(entry.name) for entry in folder.glob("*")):
        text = _text(folder / str(index))
        key = int(text, 16) if text else 0
        if key & _PARTITION == wished:
            return index
        if key:
            there[key] = index
    known = ", ".join(map(hex, there)) or "none"
    raise ArgumentError(
        "MKERNEL_PKEY", env.PKEY.show(), f"{port.name} is in no such partition: there are {known}", "see the subnet manager"
    )


def distance(gpu: str, port: DevicePort, root: Path = SYSFS) -> int:
    """The number of PCI devices on the way from a GPU to a card, both included: what `nvidia-smi topo` calls PIX, PXB ...

    It is ``_FAR`` or more if they share no PCI root.
    """
    device = root / "bus/pci/devices" / gpu.lower()
    if port.path is None or not device.exists():
        return 2 * _FAR
    mine, theirs = device.resolve().parts, port.path.parts
    shared = 0
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            break
        shared += 1
    apart = len(mine) + len(theirs) - 2 * shared
    if any(part.startswith("pci") for part in mine[:shared]):
        return apart
    numa = _text(device / "numa_node")
    return _FAR + (0 if numa == str(port.numa) else 1)


def describe_distance(far: int) -> str:
    """A distance in words."""
    if far < _FAR:
        return f"{far - 2} PCI bridges between" if far > 2 else "on one PCI bus"
    return "on the same NUMA node" if far == _FAR else "across the host" if far == _FAR + 1 else "place unknown"


def bar_bytes(gpu: str, number: int, root: Path = SYSFS) -> int:
    """Bytes of the memory window ``number`` (BAR) of a PCI device; 0 if the host does not say."""
    lines = _text(root / "bus/pci/devices" / gpu.lower() / "resource").splitlines()
    with contextlib.suppress(IndexError, ValueError):
        windows = [(int(first, 16), int(last, 16)) for first, last, _ in map(str.split, lines)]
        # A 64-bit window takes two entries, of which the second is empty.
        sizes = [last - first + 1 for first, last in windows[:6] if last]
        return sizes[number]
    return 0


def local_cpus(device: str, root: Path = SYSFS) -> set[int]:
    """The CPUs near a device; empty if the host does not say."""
    cpus: set[int] = set()
    for part in _text(root / "class/infiniband" / device / "device/local_cpulist").split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _gids(port: Path) -> list[Gid]:
    """The entries of a port's GID table that are not empty.

    Every start reads these tables, which are long (rxe: 1024 entries) and nearly empty: an empty entry costs one short read.
    """
    folder = port / "gids"
    gids = []
    for index in sorted(int(entry.name) for entry in folder.glob("*")):
        text = _text(f"{folder}/{index}")
        if text in _EMPTY:
            continue
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            continue
        kind = _text(port / f"gid_attrs/types/{index}")
        gids.append(Gid(index, address, kind, _text(port / f"gid_attrs/ndevs/{index}")))
    return gids


_EMPTY = {"", ":".join(["0000"] * 8), ":".join(["fe80"] + ["0000"] * 7)}  # no GID: zeros, or the default prefix and no interface


def _text(path: Path | str) -> str:
    """The text of an attribute, at most a page; empty if it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(file, mmap.PAGESIZE).decode().strip()
    except OSError:  # EINVAL is the answer of empty entries of a GID table
        return ""
    finally:
        os.close(file)
