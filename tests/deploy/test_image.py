"""deploy/Dockerfile, read and not built: there is no Docker where the tests run."""

from __future__ import annotations

import pytest
from dockerfile import Dockerfile, parse, problems
from manifest_model import ROOT

TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
IGNORE = (ROOT / ".dockerignore").read_text()


def complaints(text: str, ignore: str = IGNORE) -> list[str]:
    return list(problems(parse(text), ignore, ROOT))


def copied(file: Dockerfile) -> set[str]:
    words = [rest.split() for rest in file.stages["build"].all("COPY")]
    return {path.rstrip("/") for one in words for path in one[:-1]}


def test_the_image_is_fit() -> None:
    assert complaints(TEXT) == []
    assert list(parse(TEXT).stages) == ["build", "base", "ucx", "rdma", "runtime"]


def test_every_package_is_copied() -> None:
    """What `packages.find` of pyproject.toml would take from a checkout is in the image."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    paths = copied(parse(TEXT))
    assert packages - {"deploy"} <= paths
    assert {f"deploy/{path.name}" for path in (ROOT / "deploy").glob("*.py")} <= paths


def test_rdma_takes_the_ucx_of_its_own_stage() -> None:
    rdma = parse(TEXT).stages["rdma"]
    assert "--from=ucx /opt/ucx /opt/ucx" in rdma.all("COPY")
    assert any("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true" in one for one in rdma.all("ENV"))
    assert any("/opt/ucx/lib" in one and "ldconfig" in one for one in rdma.all("RUN"))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("python:3.12.12-slim-trixie", "python:latest", "python:latest is not pinned"),
        ("python:3.12.12-slim-trixie", "python:3-slim", "python:3-slim is not pinned"),
        ("USER 10001:10001", "USER root", "target runtime: runs as root"),
        ("COPY kernels/ kernels/", "COPY kernel/ kernels/", "copies kernel/, which is not there"),
        ("COPY kernels/ kernels/", "COPY tests/ tests/", "copies tests/, which .dockerignore keeps out"),
        ("COPY --from=build", "COPY --from=builder", "copies from builder"),
        ("-c constraints.txt", "", "not held to constraints.txt"),
        ("PYTHONUNBUFFERED=1", "HF_TOKEN=abc", "a secret in ENV"),
        ("HEALTHCHECK", "LABEL", "has no HEALTHCHECK"),
        ("FROM base AS runtime", "FROM base AS other", None),
    ],
)
def test_a_change_of_the_image_is_detected(old: str, new: str, complaint: str | None) -> None:
    assert old in TEXT
    changed = TEXT.replace(old, new)
    if complaint is None:
        with pytest.raises(KeyError):
            complaints(changed)
        return
    assert any(complaint in one for one in complaints(changed)), complaints(changed)


def test_keys_stay_out() -> None:
    """The ignore file names what may go in; everything else, keys among it, stays out."""
    for name in ("keys.json", ".git", "tests", "deploy/k8s", "api-keys"):
        text = TEXT.replace("COPY pyproject.toml", f"COPY {name} pyproject.toml")
        assert any(f"copies {name}, which .dockerignore keeps out" in one for one in complaints(text)), name
