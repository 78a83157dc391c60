"""Reads a Dockerfile into its stages, as far as the checks of deploy/Dockerfile need it. Nothing is built."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

PINNED = re.compile(r"[\w./-]+(:[\w.-]*\d+\.\d+[\w.-]*|@sha256:[0-9a-f]{64})")
SECRET = re.compile(r"\b\w*(TOKEN|SECRET|PASSWORD|API_KEY)\w*=")
CONTEXTS = {"ucx-src"}
"""Build contexts that the command line names."""


@dataclass
class Stage:
    """One FROM and what follows it."""

    name: str
    source: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        """The arguments of every such instruction."""
        return [rest for name, rest in self.lines if name == instruction]


@dataclass
class Dockerfile:
    """Stages by name, in order, and the defaults of the arguments before them."""

    stages: dict[str, Stage]
    arguments: dict[str, str]

    def image(self, name: str) -> str:
        """The image that a stage is made from in the end, arguments filled in."""
        source = self.stages[name].source
        if source in self.stages:
            return self.image(source)
        return re.sub(r"\$\{(\w+)\}", lambda match: self.arguments[match[1]], source)

    def chain(self, name: str) -> list[Stage]:
        """A stage behind all that it is made from."""
        stage = self.stages[name]
        return [*(self.chain(stage.source) if stage.source in self.stages else ()), stage]


def parse(text: str) -> Dockerfile:
    """Stages of a Dockerfile with comments on lines of their own and no heredocs."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    for line in kept.replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            source, _, stage = rest.partition(" AS ")
            stages[stage] = Stage(stage, source)
        elif stages and name:
            next(reversed(stages.values())).lines.append((name, rest.strip()))
        elif name == "ARG":
            key, _, value = rest.partition("=")
            arguments[key] = value
    return Dockerfile(stages, arguments)


def problems(file: Dockerfile, ignore: str, root: Path) -> Iterator[str]:
    """What is wrong with an image for production."""
    for name, stage in file.stages.items():
        if not PINNED.fullmatch(file.image(name)):
            yield f"stage {name}: {file.image(name)} is not pinned"
        yield from _copies(file, stage, ignore, root)
        for instruction, rest in stage.lines:
            if instruction in {"ENV", "ARG"} and SECRET.search(rest):
                yield f"stage {name}: a secret in {instruction} {rest}"
        for command in stage.all("RUN"):
            if "pip install" in command and "-c constraints.txt" not in command:
                yield f"stage {name}: pip is not held to constraints.txt"
    for target in ("runtime", "rdma"):
        users = [user for stage in file.chain(target) for user in stage.all("USER")]
        if not users or users[-1].split(":")[0] in {"0", "root"}:
            yield f"target {target}: runs as root"
        if not any(stage.all("HEALTHCHECK") for stage in file.chain(target)):
            yield f"target {target}: has no HEALTHCHECK"
    if list(file.stages)[-1] != "runtime":
        yield "the last stage is not runtime: a build without --target makes another image"


def _copies(file: Dockerfile, stage: Stage, ignore: str, root: Path) -> Iterator[str]:
    for rest in stage.all("COPY"):
        words = shlex.split(rest)
        source = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
        if source is not None and source not in {*file.stages, *CONTEXTS}:
            yield f"stage {stage.name}: copies from {source}, which is no stage"
        for path in words[:-1] if source is None else ():
            if not (root / path).exists():
                yield f"stage {stage.name}: copies {path}, which is not there"
            if _ignored(path.rstrip("/"), ignore):
                yield f"stage {stage.name}: copies {path}, which .dockerignore keeps out"


def _ignored(path: str, ignore: str) -> bool:
    """Docker's rule: the last pattern that fits a path or a folder above it decides."""
    parents = ["/".join(path.split("/")[: count + 1]) for count in range(path.count("/") + 1)]
    result = False
    for line in (one for one in ignore.splitlines() if one and not one.startswith("#")):
        pattern = line.removeprefix("!")
        if any(fnmatch(one, pattern) and (pattern != "*" or "/" not in one) for one in parents):
            result = not line.startswith("!")
    return result
