"""All checks of a rendered overlay: functions that take it and return what is wrong, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from manifest_model import ROOT, Rendered
from manifest_network import check_network, check_selectors
from manifest_pods import (
    check_images,
    check_memory,
    check_mounts,
    check_probes,
    check_resources,
    check_scrapes,
    check_security,
)
from manifest_product import (
    check_devices,
    check_disruption,
    check_files,
    check_ports,
    check_references,
    check_sizes,
    check_times,
    check_tokens,
    check_versions,
)


def check_documented(rendered: Rendered) -> Iterator[str]:
    """`check_references`, with what deploy/README.md says."""
    return check_references(rendered, (ROOT / "deploy" / "README.md").read_text())


def check_ray(rendered: Rendered) -> Iterator[str]:
    """`check_versions`, with what pyproject.toml says."""
    return check_versions(rendered, (ROOT / "pyproject.toml").read_text())


CHECKS: tuple[Callable[[Rendered], Iterable[str]], ...] = (
    check_resources,
    check_images,
    check_memory,
    check_security,
    check_mounts,
    check_probes,
    check_scrapes,
    check_selectors,
    check_network,
    check_sizes,
    check_devices,
    check_ports,
    check_files,
    check_tokens,
    check_documented,
    check_times,
    check_disruption,
    check_ray,
)
