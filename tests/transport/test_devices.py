"""Cards of a host from a made-up sysfs: ports, GIDs by content, cards near GPUs, the switches that override."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkernel import env
from mkernel.errors import ArgumentError
from mkernel.transport import Card, devices

PREFIX = "fe80:0000:0000:0000:"
LINK_LOCAL = PREFIX + "5054:00ff:fe00:0101"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0007"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a4e:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
GIDS = [(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (MAPPED, "IB/RoCE v1"), (MAPPED, "RoCE v2"), (EMPTY, "")]


class Host:
    """A tree like /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "class/infiniband").mkdir(parents=True)
        (root / "bus/pci/devices").mkdir(parents=True)

    def pci(self, path: str, **files: str) -> Path:
        """A device below ``devices``, e.g. "pci0000:00/0000:00:01.0/0000:01:00.0"."""
        device = self.root / "devices" / path
        device.mkdir(parents=True)
        for name, text in files.items():
            (device / name).write_text(text + "\n")
        (self.root / "bus/pci/devices" / device.name).symlink_to(device)
        return device

    def card(
        self,
        name: str,
        pci: str = "",
        *,
        state: str = "4: ACTIVE",
        link: str = "Ethernet",
        gids: list[tuple[str, str]] | None = None,
        driver: str = "mlx5_core",
        numa: str = "0",
        cpus: str = "",
        rate: str = "400 Gb/sec (4X NDR)",
        node_type: str = "1: CA",
        pkeys: tuple[str, ...] = ("0xffff",),
    ) -> None:
        device = self.root / "class/infiniband" / name
        port = device / "ports/1"
        for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (port / folder).mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "link_layer").write_text(link + "\n")
        (port / "rate").write_text(rate + "\n")
        (device / "node_type").write_text(node_type + "\n")
        (port / "pkeys").mkdir()
        for index, pkey in enumerate(pkeys):
            (port / "pkeys" / str(index)).write_text(pkey + "\n")
        for index, (gid, kind) in enumerate(GIDS if gids is None else gids):
            (port / "gids" / str(index)).write_text(gid + "\n")
            if kind:
                (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")
                (port / "gid_attrs/ndevs" / str(index)).write_text("eth1\n")
        if pci:
            path = self.pci(pci, numa_node=numa, local_cpulist=cpus)
            (device / "device").symlink_to(path)
            if driver:
                (self.root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
                (path / "driver").symlink_to(self.root / "bus/pci/drivers" / driver)

    @property
    def ports(self) -> list[devices.DevicePort]:
        return devices.find(self.root)

    def choose(self, name: str = "rc", place: int = 0, gpu: str = "", link: str | None = None) -> Card:
        (card,) = devices.cards_for(name, place, gpu, root=self.root, link=link)
        return card


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_host_without_cards(tmp_path: Path) -> None:
    assert devices.find(tmp_path) == []
    assert devices.problem("rc", []) == "no RDMA device"
    assert devices.problem("srd", []) == "no EFA device"


def test_ports_are_described(host: Host) -> None:
    host.card("mlx5_1", "pci0000:00/0000:01:00.0", numa="1", cpus="8-11,24")
    host.card("rxe0")
    first, second = host.ports
    assert (first.name, first.state, first.active, first.driver, first.numa) == ("mlx5_1:1", "ACTIVE", True, "mlx5_core", 1)
    assert (first.link_layer, first.rate, first.transport) == ("Ethernet", "400 Gb/sec (4X NDR)", "rc")
    assert (second.name, second.driver, second.path) == ("rxe0:1", "", None)
    assert [gid.index for gid in first.gids] == [0, 1, 2, 3], "empty entries are none"
    assert str(first.gids[3]) == "3: 10.78.0.1 (RoCE v2, eth1)"
    assert devices.local_cpus("mlx5_1", host.root) == {8, 9, 10, 11, 24}
    assert devices.local_cpus("rxe0", host.root) == set()


@pytest.mark.parametrize(
    ("gids", "expected"),
    [
        (GIDS, 3),
        ([(LINK_LOCAL, "RoCE v2"), (GLOBAL, "RoCE v2")], 1),
        ([(GLOBAL, "RoCE v2"), (LINK_LOCAL, "RoCE v2"), (MAPPED, "RoCE v2")], 2),
        ([(MAPPED, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2")], 1),
        ([(LINK_LOCAL, "IB/RoCE v1"), (MAPPED, "IB/RoCE v1")], 1),
        ([(EMPTY, ""), (PREFIX + "0000:0000:0000:0000", "RoCE v2")], None),
        ([], None),
    ],
)
def test_gid_by_content(host: Host, gids: list[tuple[str, str]], expected: int | None) -> None:
    host.card("mlx5_0", gids=gids)
    chosen = devices.choose_gid(host.ports[0])
    assert (None if chosen is None else chosen.index) == expected


@pytest.mark.parametrize("link", ["InfiniBand", "Unspecified"])
def test_without_roce_the_first_gid_will_do(host: Host, link: str) -> None:
    host.card("ib0", link=link, gids=[(LINK_LOCAL, ""), (GLOBAL, "")])
    chosen = devices.choose_gid(host.ports[0])
    assert chosen is not None
    assert chosen.index == 0


def test_what_is_wrong_is_said(host: Host) -> None:
    host.card("mlx5_0", state="1: DOWN")
    assert devices.problem("rc", host.ports) == "no port is up: mlx5_0:1 is DOWN"
    assert devices.problem("srd", host.ports) == "no EFA device"
    host.card("mlx5_1", gids=[])
    assert devices.problem("rc", host.ports).startswith("mlx5_1:1 has no GID")
    with pytest.raises(ArgumentError, match="has no GID"):
        host.choose()
    host.card("mlx5_2")
    assert devices.problem("rc", host.ports) == ""
    assert host.choose() == Card("mlx5_2", 1, 3)


def test_efa_is_for_srd(host: Host) -> None:
    host.card("rdmap0", "pci0000:00/0000:00:05.0", driver="efa", link="Unspecified", gids=[(LINK_LOCAL, "")])
    assert devices.problem("rc", host.ports) == "no RDMA device"
    assert devices.problem("srd", host.ports) == ""
    assert host.choose("srd") == Card("rdmap0", 1, 0)


def test_ranks_without_gpus_take_turns(host: Host) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        host.card(name)
    host.card("mlx5_2", state="1: DOWN")
    assert [host.choose(place=place).device for place in range(4)] == ["mlx5_0", "mlx5_1", "mlx5_0", "mlx5_1"]


@pytest.fixture
def two_roots(host: Host) -> Host:
    """Two sockets; behind the first two switches, each with a GPU and a card; a card alone at the second."""
    for switch in (1, 2):
        host.pci(f"pci0000:00/0000:0{switch}:00.0/0000:1{switch}:00.0/0000:2{switch}:00.0", numa_node="0")
        host.card(f"mlx5_{switch}", f"pci0000:00/0000:0{switch}:00.0/0000:1{switch}:01.0/0000:3{switch}:00.0")
    host.card("mlx5_9", "pci0000:80/0000:81:00.0/0000:91:00.0", numa="1")
    host.pci("pci0000:80/0000:82:00.0/0000:92:00.0", numa_node="1")
    host.pci("pci0000:c0/0000:c1:00.0", numa_node="1")
    return host


def test_the_nearest_card(two_roots: Host) -> None:
    host = two_roots
    assert host.choose(place=0, gpu="0000:22:00.0").device == "mlx5_2"
    assert host.choose(place=1, gpu="0000:21:00.0").device == "mlx5_1"
    assert host.choose(place=0, gpu="0000:92:00.0").device == "mlx5_9"
    assert host.choose(place=0, gpu="0000:C1:00.0").device == "mlx5_9", "no shared root, but the same NUMA node"
    assert host.choose(place=1, gpu="0000:ff:00.0").device == "mlx5_2", "unknown places are equally far"


def test_distances_have_an_order(two_roots: Host) -> None:
    ports = {port.device: port for port in two_roots.ports}
    gpu = "0000:21:00.0"
    near, root, far = (devices.distance(gpu, ports[name], two_roots.root) for name in ("mlx5_1", "mlx5_2", "mlx5_9"))
    assert near < root < far
    assert devices.describe_distance(near) != devices.describe_distance(root)
    assert "across" in devices.describe_distance(far)
    assert devices.distance("0000:ff:00.0", ports["mlx5_1"], two_roots.root) > far


def test_switches(two_roots: Host) -> None:
    with env.override(MKERNEL_NIC="mlx5_9, mlx5_1:1"):
        assert [two_roots.choose(place=place, gpu="0000:22:00.0").device for place in range(3)] == ["mlx5_9", "mlx5_1", "mlx5_9"]
    with env.override(MKERNEL_NIC="mlx5_9+mlx5_1:1,mlx5_2"):
        both, one = (devices.cards_for("rc", slot, ports=two_roots.ports, root=two_roots.root) for slot in (0, 1))
        assert [card.device for card in both] == ["mlx5_9", "mlx5_1"]
        assert [card.gigabits for card in both] == [400.0, 400.0]
        assert [card.device for card in one] == ["mlx5_2"]
        assert devices.links(two_roots.ports) == {"Ethernet": 400.0}
    with env.override(MKERNEL_NIC="mlx5_1+mlx5_1:1"), pytest.raises(ArgumentError, match="named twice"):
        two_roots.choose()
    with env.override(MKERNEL_NIC="mlx5_1+mlx5_7"), pytest.raises(ArgumentError, match="MKERNEL_NIC = mlx5_7"):
        two_roots.choose()
    with env.override(MKERNEL_NIC="mlx5_7"), pytest.raises(ArgumentError, match=r"MKERNEL_NIC = mlx5_7.*there are mlx5_1:1 \(active\)"):
        two_roots.choose()
    with env.override(MKERNEL_NIC="a,,b"), pytest.raises(ArgumentError, match="one comma"):
        two_roots.choose()
    with env.override(MKERNEL_GID_INDEX=1):
        assert two_roots.choose().gid_index == 1
    with env.override(MKERNEL_GID_INDEX=4), pytest.raises(ArgumentError, match=r"MKERNEL_GID_INDEX = 4.*3: 10\.78\.0\.1"):
        two_roots.choose()


def test_of_equally_near_cards_the_faster(host: Host) -> None:
    """A storage card of 100 Gb/s beside the GPU's switch is as near as the compute card."""
    host.pci("pci0000:00/0000:01:00.0/0000:21:00.0", numa_node="0")
    for name, rate in (("mlx5_0", "100 Gb/sec (4X EDR)"), ("mlx5_1", "400 Gb/sec (4X NDR)"), ("mlx5_2", "400 Gb/sec (4X NDR)")):
        host.card(name, f"pci0000:00/0000:01:00.0/0000:3{name[-1]}:00.0", rate=rate)
    host.card("mlx5_3", "pci0000:00/0000:02:00.0/0000:41:00.0", rate="800 Gb/sec (4X XDR)")
    assert [host.choose(place=place, gpu="0000:21:00.0").device for place in range(3)] == ["mlx5_1", "mlx5_2", "mlx5_1"], "nearness first"
    assert [port.gigabits for port in host.ports] == [100, 400, 400, 800]
    host.card("odd", rate="")
    assert host.ports[-1].gigabits == 0


def test_one_link_layer_on_all_ranks(host: Host) -> None:
    host.card("mlx5_0", link="InfiniBand", gids=[(LINK_LOCAL, "")])
    host.card("mlx5_1", rate="800 Gb/sec (4X XDR)")
    host.card("mlx5_2", rate="100 Gb/sec (4X EDR)")
    assert devices.links(host.ports) == {"InfiniBand": 400, "Ethernet": 800}
    with env.override(MKERNEL_NIC="mlx5_2:1"):
        assert devices.links(host.ports) == {"Ethernet": 100}
    assert host.choose(link="InfiniBand").device == "mlx5_0"
    assert host.choose(link="Ethernet").device == "mlx5_1"
    with env.override(MKERNEL_NIC="mlx5_0"), pytest.raises(ArgumentError, match="cannot be used for rc over Ethernet"):
        host.choose(link="Ethernet")
    with pytest.raises(ArgumentError, match=r"no port is Unspecified.*MKERNEL_NIC"):
        host.choose(link="Unspecified")


def test_iwarp_is_not_for_rc(host: Host) -> None:
    """It has no immediates and no atomics, and needs another way to connect: said before it is chosen."""
    host.card("irdma0", node_type="4: RNIC")
    assert devices.problem("rc", host.ports).startswith("irdma0:1 speaks iWARP")
    assert devices.links(host.ports) == {}
    with pytest.raises(ArgumentError, match="iWARP"):
        host.choose()
    host.card("irdma1")
    assert host.choose().device == "irdma1"


def test_partitions(host: Host) -> None:
    host.card("mlx5_0", link="InfiniBand", gids=[(LINK_LOCAL, "")], pkeys=("0xffff", "0x0000", "0x8012", "0x0013"))
    assert host.choose().pkey_index == 0
    for text, index in (("0x8012", 2), ("12", 2), ("0x12", 2), ("8013", 3), ("0xffff", 0)):
        with env.override(MKERNEL_PKEY=text):
            assert host.choose().pkey_index == index
    with env.override(MKERNEL_PKEY="0x8055"), pytest.raises(ArgumentError, match=r"MKERNEL_PKEY.*mlx5_0:1.*0xffff, 0x8012, 0x13"):
        host.choose()
    for bad in ("0x8000", "0x12345", "mine"):
        with env.override(MKERNEL_PKEY=bad), pytest.raises(ArgumentError, match="MKERNEL_PKEY"):
            host.choose()


def test_memory_windows(host: Host) -> None:
    lines = ["0x0 0xffffff 0x40200", "0x1000000000 0x1fffffffff 0x14220c", "0x0 0x0 0x0", "0x2000000000 0x2001ffffff 0x14220c"]
    host.pci("pci0000:00/0000:41:00.0", resource="\n".join([*lines, *["0x0 0x0 0x0"] * 3]))
    assert devices.bar_bytes("0000:41:00.0", 1, host.root) == 64 << 30
    assert devices.bar_bytes("0000:41:00.0", 3, host.root) == 0
    assert devices.bar_bytes("0000:42:00.0", 1, host.root) == 0


def test_unreadable_entries_are_left_out(host: Host) -> None:
    host.card("mlx5_0")
    unreadable = host.root / "class/infiniband/mlx5_0/ports/1/gids/3"
    unreadable.unlink()
    unreadable.mkdir()  # reading it fails, for root too
    assert [gid.index for gid in host.ports[0].gids] == [0, 1, 2]
