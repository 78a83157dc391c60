"""Lists the probes of `disagg doctor`. Every probe also works on a machine without a GPU."""

from __future__ import annotations

from disagg.doctor import gpu, host, network, sockets
from disagg.doctor.findings import Probe


def all_probes() -> list[Probe]:
    """Returns every probe, in the order of the report."""
    return [
        host.probe_python,
        host.probe_packages,
        host.probe_clashes,
        gpu.probe_torch,
        gpu.probe_gpus,
        network.probe_ucxx,
        network.probe_ucx,
        network.probe_transport,
        network.probe_ray,
        sockets.probe_sockets,
        host.probe_shared_memory,
        host.probe_limits,
    ]
