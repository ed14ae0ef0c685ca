"""What the ranks tell each other when a world is opened."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

from mkernel import env
from mkernel.errors import Error
from mkernel.jit.headers import sources_digest
from mkernel.runtime.opening.placement import RankInfo, require_same_build
from mkernel.runtime.opening.target import gpus_here
from mkernel.runtime.options import Options
from mkernel.runtime.ranks.bootstrap import Bootstrap, host_identity
from mkernel.runtime.ranks.choice import number_on_host
from mkernel.transport import TRANSPORTS, devices, host_signals
from mkernel.version import VERSION

__all__ = ["exchange_infos", "networks_here", "sources"]


def exchange_infos(bootstrap: Bootstrap, options: Options, *, probe: bool, in_use: int | None = None) -> list[RankInfo]:
    """What every rank tells about itself, by rank. Collective.

    ``probe``: look for GPUs where the target may be cuda. ``in_use``: the ordinal of the GPU of another world of this process.
    """
    gpus, problem, preferred = gpus_here(in_use) if probe and options.target in ("auto", "cuda") else ((), "", None)
    info = RankInfo(
        host_identity(),
        dataclasses.asdict(options),
        gpus,
        problem,
        preferred,
        number_on_host(),
        networks=networks_here(),
        links=devices.links(devices.find()),
        host_signals=list(filter(host_signals, TRANSPORTS)),
        engine=env.EMULATED_ENGINE.get(),
        shares=env.SHARE_GPUS.get(),
        version=VERSION,
        sources=sources(),
    )
    told = [json.loads(part) for part in bootstrap.allgather(json.dumps(info.to_json()).encode())]
    # The builds are compared first, because other builds may tell other things.
    require_same_build([(fields.get("version", "?"), fields.get("sources", "?")) for fields in told])
    return [RankInfo.from_json(fields) for fields in told]


def sources() -> str:
    """The digest of the device code, or why there is none. Never raises: the others wait for this rank's info."""
    try:
        return sources_digest()
    except (Error, OSError) as error:
        return f"that cannot be read ({error})"


def networks_here() -> dict[str, str]:
    """Why each RDMA transport, in order of preference, cannot be used here; empty if it can. Reads sysfs only."""
    ports = devices.find()
    missing = "pyverbs is not installed" if ports and importlib.util.find_spec("pyverbs") is None else ""
    rdma = [name for name, entry in TRANSPORTS.items() if entry.rdma]
    return {name: devices.problem(name, ports) or missing for name in rdma}
