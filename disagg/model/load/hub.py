"""Models of the Hugging Face hub, by name: finds them in huggingface_hub's cache, or downloads them into it.

huggingface_hub reads its own environment: `HF_HOME` and `HF_HUB_CACHE` (the cache), `HF_TOKEN`, `HF_ENDPOINT`,
`HF_HUB_OFFLINE=1` (the cache alone). Files of code are never downloaded.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disagg.core.errors import ConfigError

PROGRESS_S = 5.0
"""Interval between lines of progress where stderr is no terminal."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Formats of weights; the second one is downloaded only if the model lacks the first one."""
_IGNORED = ("*/*", "consolidated*")
"""Folders with other formats, and a second copy of the weights under other names."""


def is_hub_name(path: str) -> bool:
    """Returns whether `path` has the form ORGANIZATION/MODEL and is no path on this machine."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def folder_label(directory: Path) -> str:
    """Returns the name of a folder, or the name on the hub of the model whose snapshot it is."""
    folder = directory.resolve()
    cached = folder.parent.parent.name
    if folder.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")  # no name on the hub contains `--`
    return folder.name


def download(name: str, revision: str | None) -> Path:
    """Returns the folder of a model's snapshot, after a download of the files that the cache lacks.

    `revision` is a branch, a tag or a commit; None is the branch `main`. Without a connection, the cached snapshot
    is used. Raises `ConfigError` if the hub has no such model or revision, refuses access, or cannot be reached.
    """
    folder = _snapshot(name, revision, _WEIGHTS[0])
    return folder if any(folder.glob(_WEIGHTS[0])) else _snapshot(name, revision, _WEIGHTS[1])


def checkpoint_folder(path: str, revision: str | None, *, cached: bool = True) -> Path:
    """Returns `path`, or the folder of the snapshot of the model that it names on the hub.

    `cached`: a complete snapshot in the cache is used without a request to the hub. Raises `ConfigError` as
    `download` does, and for the revision of a folder.
    """
    if not is_hub_name(path):
        if revision is not None:
            raise ConfigError(
                f"--revision {revision}: {path} is a folder, and only models of the hub have revisions"
            )
        return Path(path)
    if not cached:
        return download(path, revision)
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    for weights in _WEIGHTS:
        try:
            folder = _snapshot_folder(name=path, revision=revision, weights=weights, cached=True)
        except (LocalEntryNotFoundError, HFValidationError):
            return download(path, revision)
        if any(folder.glob(weights)):
            return folder
    return folder


def _snapshot(name: str, revision: str | None, weights: str) -> Path:
    with _hub_errors(name, revision):
        return _snapshot_folder(name=name, revision=revision, weights=weights, cached=False)


def _snapshot_folder(*, name: str, revision: str | None, weights: str, cached: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name,
            revision=revision,
            local_files_only=cached,
            allow_patterns=[*_TEXT_FILES, weights],
            ignore_patterns=list(_IGNORED),
            tqdm_class=None if sys.stderr.isatty() else _progress_lines(name),
        )
    )


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Converts errors of huggingface_hub inside the block to `ConfigError`s with the remedy."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as exc:
        raise ConfigError(
            f"the hub restricts {name}: accept its terms on {constants.ENDPOINT}/{name}, and set HF_TOKEN to a token "
            f"of that account"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise ConfigError(
            f"{name} is no folder on this machine, and {constants.ENDPOINT} has no such model; a private model needs "
            f"HF_TOKEN"
        ) from exc
    except errors.RevisionNotFoundError as exc:
        raise ConfigError(f"{name} has no revision {revision}: give a branch, a tag or a commit") from exc
    except errors.LocalEntryNotFoundError as exc:
        what = f"{name} at revision {revision}" if revision else name
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"{what} is no folder on this machine and not complete in the cache {constants.HF_HUB_CACHE}, and "
                f"HF_HUB_OFFLINE is set: unset it, or give the folder of a checkpoint"
            ) from exc
        raise ConfigError(
            f"{what} is no folder on this machine, and the hub cannot be reached: {_cause(exc)}"
        ) from exc
    except PermissionError as exc:
        raise ConfigError(f"{exc.filename} cannot be written: HF_HUB_CACHE sets another folder") from exc
    except (errors.HFValidationError, errors.HfHubHTTPError) as exc:
        raise ConfigError(f"{name} cannot be downloaded: {_cause(exc)}") from exc


def _cause(exc: BaseException) -> str:
    """Returns the first line of the original error."""
    text = str(exc.__cause__ or exc).strip()
    return text.splitlines()[0] if text else type(exc.__cause__ or exc).__name__


def _progress_lines(name: str) -> type[Any]:
    """Returns a progress bar for huggingface_hub that prints a line each `PROGRESS_S`, for logs."""
    from huggingface_hub.utils import tqdm

    class DownloadLines(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread of tqdm
        _next_s = 0.0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | {"disable": False, "mininterval": 0}))

        def close(self) -> None:
            self.disable = True  # without a last line

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            now_s = time.monotonic()
            if self.unit == "B" and self.total and self.n and now_s >= DownloadLines._next_s:
                DownloadLines._next_s = now_s + PROGRESS_S
                share, size = self.n / self.total, self.format_sizeof(self.total, "B")
                sys.stderr.write(f"downloading {name}: {share:.0%} of {size}\n")

    return DownloadLines
