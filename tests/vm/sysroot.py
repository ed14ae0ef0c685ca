"""What the virtual machines are made of: the distribution's kernel and RDMA packages, unpacked once, and the first process.

Nothing is installed on the host: packages are downloaded to a folder beside mkernel's cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import lzma
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["APT", "Sysroot", "UnavailableError", "cache_folder", "sysroot", "unavailable"]

APT = "apt-get install -y --no-install-recommends qemu-system-x86"
_PACKAGES = ("python3-pyverbs", "libibverbs1", "ibverbs-providers", "librdmacm1", "iproute2", "busybox-static")
# In the order of insertion.
_MODULES = """
crc32_generic crc32c_generic virtio_ring virtio_pci_modern_dev virtio_pci_legacy_dev virtio virtio_pci failover net_failover
virtio_net 9pnet 9pnet_virtio netfs fscache 9p overlay ib_core ib_uverbs ib_cm iw_cm configfs rdma_cm rdma_ucm udp_tunnel
ip6_udp_tunnel rdma_rxe
"""
_FORMAT = 5  # of the unpacked folder: raise it when _prepare changes


class UnavailableError(Exception):
    """The machines cannot be booted here; the text says why and what would help."""


@dataclasses.dataclass(frozen=True)
class Sysroot:
    """The unpacked files."""

    kernel: Path
    initramfs: Path
    root: Path  # laid over the host's files
    pyverbs: Path  # put on PYTHONPATH: holds the pyverbs package and nothing else


def unavailable() -> str | None:
    """Why no machine can be booted here; None if one can. Downloads what is missing (once)."""
    try:
        sysroot()
    except UnavailableError as error:
        return str(error)
    return None


@functools.cache
def _sysroot() -> Sysroot | UnavailableError:
    try:
        return _prepare()
    except UnavailableError as error:
        return error


def sysroot() -> Sysroot:
    """The kernel and the packages, unpacked. Raises UnavailableError."""
    found = _sysroot()
    if isinstance(found, UnavailableError):
        raise found
    return found


def lacks() -> str | None:
    """What this host lacks to boot machines, as far as can be seen without downloading anything."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the machines are x86-64 Linux"
    if os.geteuid() != 0:
        return "must be root"
    if shutil.which("qemu-system-x86_64") is None:
        return f"no qemu-system-x86_64: {APT}"
    if not all(map(shutil.which, ("apt-get", "apt-cache", "dpkg-deb", "tar"))):
        return "needs a Debian host: kernel and RDMA packages come from its archive"
    return None


def _prepare() -> Sysroot:
    if (missing := lacks()) is not None:
        raise UnavailableError(missing)
    image = _kernel_package()
    archives = _archives(image)
    name = hashlib.sha256(f"{_FORMAT} {archives}".encode()).hexdigest()[:16]
    folder = cache_folder() / name
    if not (folder / "ready").exists():
        _unpack(folder, [image], archives)
    pyverbs = folder / "root/usr/lib/python3/dist-packages/pyverbs"
    if not pyverbs.is_dir():
        pyverbs = Path("/usr/lib/python3/dist-packages/pyverbs")  # installed on the host
    minor = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    if not any(minor in file.name for file in pyverbs.glob("device.*.so")):
        raise UnavailableError(f"the distribution's pyverbs is not built for Python {platform.python_version()}")
    alone = folder / "pyverbs"
    alone.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (alone / "pyverbs").symlink_to(pyverbs)
    return Sysroot(next(folder.glob("vmlinuz*")), folder / "initramfs", folder / "root", alone)


def cache_folder() -> Path:
    """Beside mkernel's own cache, but never the temporary one of a test run: these downloads are large."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mkernel-vm"


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=300)
    if done.returncode:
        raise UnavailableError(f"`{shlex.join(command)}` failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


def _kernel_package() -> str:
    """The package behind linux-image-amd64; its name holds a version and changes. The -cloud kernels have no rdma_rxe."""
    for line in _run("apt-cache", "depends", "linux-image-amd64").splitlines():
        kind, _, name = line.strip().partition(": ")
        if kind == "Depends" and name.startswith("linux-image-"):
            return name
    raise UnavailableError("apt knows no linux-image-amd64: apt-get update")


def _archives(image: str) -> list[str]:
    """``package=version`` of all that must be unpacked: the packages, with what they need and the host has not."""
    lines = _run("apt-get", "install", "-y", "--no-install-recommends", "--simulate", *_PACKAGES).splitlines()
    wanted = [line.split() for line in lines if line.startswith("Inst ")]  # Inst name [old] (version suite [arch])
    new = {fields[1]: next(field for field in fields[2:] if field.startswith("("))[1:] for fields in wanted}
    policy = _run("apt-cache", "policy", image)
    version = next((line.split()[1] for line in policy.splitlines() if line.strip().startswith("Candidate:")), "(none)")
    if version == "(none)":
        raise UnavailableError(f"apt has no candidate of {image}: apt-get update")
    return sorted(f"{name}={version}" for name, version in {**new, image: version}.items())


def _unpack(folder: Path, images: Sequence[str], archives: Sequence[str]) -> None:
    downloads = cache_folder() / "archives"
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=cache_folder()) as temporary:
        new, root = Path(temporary) / "new", Path(temporary) / "new/root"
        (root / "usr").mkdir(parents=True)
        merged = ("bin", "sbin", "lib", "lib64")
        for name in merged:
            (root / "usr" / name).mkdir()
            (root / name).symlink_to(f"usr/{name}")
        for archive in archives:
            package = archive.partition("=")[0]
            file = _download(archive, downloads)
            only = ["--wildcards", "./boot/vmlinuz-*", *(f"*/{name}.ko*" for name in _MODULES.split())] if package in images else []
            _untar(file, new if only else root, only)
        for name in merged:
            (root / name).unlink()  # else they would hide the host's own
        next((new / "boot").glob("vmlinuz-*")).rename(new / "vmlinuz")
        _make_initramfs(new, root)
        for rest in ("boot", "lib", "usr"):
            shutil.rmtree(new / rest, ignore_errors=True)
        (new / "ready").touch()
        with contextlib.suppress(OSError):  # somebody else was faster
            new.rename(folder)
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        raise UnavailableError(f"{folder} cannot be made")


def _download(archive: str, downloads: Path) -> Path:
    file = downloads / f"{archive.replace(':', '%3a')}.deb"
    if not file.exists():
        with tempfile.TemporaryDirectory(prefix="get-", dir=downloads) as temporary:
            _run("apt-get", "download", "-o", "APT::Sandbox::User=root", archive, cwd=Path(temporary))
            next(Path(temporary).glob("*.deb")).rename(file)
    return file


def _untar(archive: Path, folder: Path, only: Sequence[str]) -> None:
    command = f"dpkg-deb --fsys-tarfile {shlex.quote(str(archive))} | tar -x --keep-directory-symlink -C {shlex.quote(str(folder))} "
    _run("bash", "-o", "pipefail", "-c", command + shlex.join(only))


def _make_initramfs(folder: Path, root: Path) -> None:
    found = {file.name.partition(".ko")[0].replace("-", "_"): file for file in folder.rglob("*.ko*")}
    folders = ("bin", "modules", "proc", "sys", "dev", "host", "over", "rw", "root")
    files: dict[str, tuple[int, bytes]] = {name: (0o40755, b"") for name in folders}  # noqa: C420 - the mode reads better in octal
    places = (root / "usr/bin/busybox", root / "bin/busybox", Path("/bin/busybox"))
    busybox = next((file for file in places if file.exists()), None)
    if busybox is None:
        raise UnavailableError("busybox-static holds no busybox")
    files["bin/busybox"] = (0o100755, busybox.read_bytes())
    for number, name in enumerate(_MODULES.split()):
        if name in found:  # a module that is missing is built in, or insmod of those that need it says so
            data = found[name].read_bytes()
            files[f"modules/{number:02d}-{name}.ko"] = (0o100644, lzma.decompress(data) if found[name].suffix == ".xz" else data)
    files["init"] = (0o100755, _INIT.encode())
    (folder / "initramfs").write_bytes(_cpio(files))


def _cpio(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """An archive in the format "newc"."""
    out = io.BytesIO()
    for number, (name, (mode, data)) in enumerate([*files.items(), ("TRAILER!!!", (0, b""))], 1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out.write(b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0")
        out.write(b"\0" * (-out.tell() % 4) + data)
        out.write(b"\0" * (-out.tell() % 4))
    return out.getvalue()


# Runs as process 1. What the kernel's command line holds as name=value is in the environment.
_INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*.ko; do insmod $module; done
nine="trans=virtio,version=9p2000.L,msize=524288"
mount -t 9p -o $nine,cache=loose,ro host /host
mount -t 9p -o $nine,cache=loose,ro over /over
mount -t tmpfs -o size=80% rw /rw
mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/over:/host,upperdir=/rw/upper,workdir=/rw/work root /root
for name in proc sys dev mnt; do mkdir -p /root/$name; done
mount -t proc proc /root/proc
mount -t sysfs sys /root/sys
mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/shm /root/mnt/job
mount -t tmpfs shm /root/dev/shm
mount -t 9p -o $nine job /root/mnt/job
ulimit -l unlimited
ip link set lo up
ip link set eth0 up
ip address add $ADDRESS0/24 dev eth0
ip link set eth1 mtu 4200 up
ip address add $ADDRESS1/24 dev eth1
unset nine module name
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
chroot /root rdma link add rxe0 type rxe netdev eth1
round=0
while true; do
  while [ ! -e /root/mnt/job/$round/run ]; do sleep 0.1; done
  chroot /root sh /mnt/job/$round/run
  dmesg > /root/mnt/job/$round/dmesg
  touch /root/mnt/job/$round/done
  round=$((round + 1))
done
"""
