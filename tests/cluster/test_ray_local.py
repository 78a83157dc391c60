"""What a Ray of our own is given: an environment, a token file, a folder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conditions import PATIENCE_S
from structlog.testing import capture_logs

from disagg.cluster.local_ray import LOOPBACK_ENV, ensure_token, loopback_env, session_folder
from disagg.core.errors import ConfigError, DisaggError
from disagg.core.folders import create_file, private_folder

LONGEST_SOCKET = "session_2026-11-22_16-02-14_180559_4194304/sockets/plasma_store"
SOCKET_PATH_BYTES = 107


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_once_for_this_user_only(home: Path) -> None:
    before = os.umask(0)
    try:
        ensure_token()
    finally:
        os.umask(before)
    path = home / ".ray" / "auth_token"
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    token = path.read_text()
    assert len(token) == 64
    ensure_token()
    assert path.read_text() == token


def test_starts_at_once_have_one_token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start that saw no file either must not replace the token that the first one's Ray has read."""
    path = home / ".ray" / "auth_token"

    def late(made: Path, body: bytes) -> None:
        made.write_text("of the first start")
        made.chmod(0o600)
        create_file(made, body)

    monkeypatch.setattr("disagg.cluster.local_ray.create_file", late)
    ensure_token()
    assert [(one, one.read_text()) for one in path.parent.iterdir()] == [(path, "of the first start")]


def test_a_token_that_others_can_read_is_closed(home: Path) -> None:
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("mine")
    path.chmod(0o644)
    with capture_logs() as lines:
        ensure_token()
    assert (mode(path), path.read_text()) == (0o600, "mine")
    assert [line["event"] for line in lines] == ["ray_token_closed"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_AUTH_TOKEN", "t"), ("RAY_AUTH_TOKEN_PATH", "/x"), ("RAY_AUTH_MODE", "disabled")],
)
def test_the_environment_comes_first(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    ensure_token()
    assert not list(home.iterdir())


def test_a_home_that_is_no_folder_is_a_config_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH"):
        ensure_token()


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = LOOPBACK_ENV
    monkeypatch.setenv(first, "before")
    for name in others:
        monkeypatch.delenv(name, raising=False)
    with loopback_env():
        assert {name: os.environ[name] for name in LOOPBACK_ENV} == LOOPBACK_ENV
    assert {name: os.environ.get(name) for name in LOOPBACK_ENV} == {first: "before"} | dict.fromkeys(others)


def test_the_session_folder_is_private_and_goes() -> None:
    with session_folder() as folder:
        folder.mkdir(mode=0o777)
        assert mode(folder.parent) == 0o700
        assert len(os.fsencode(folder / LONGEST_SOCKET)) <= SOCKET_PATH_BYTES
    assert not folder.parent.exists()


@pytest.mark.parametrize(("error", "stays"), [(DisaggError("a rank died"), True), (ConfigError("no"), False)])
def test_the_session_folder_stays_for_its_logs_after_an_error(error: DisaggError, stays: bool) -> None:
    folders: list[Path] = []

    def fail() -> None:
        with session_folder() as folder:
            folders.append(folder.parent)
            raise error

    with capture_logs() as lines, pytest.raises(type(error)):
        fail()
    assert (folders[0].exists(), [line["event"] for line in lines]) == (stays, ["ray_logs_kept"] * stays)
    if stays:
        folders[0].rmdir()


def test_a_private_folder_has_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = private_folder("test")
    try:
        assert folder.parent == Path("/tmp")
        assert mode(folder) == 0o700
    finally:
        folder.rmdir()


def test_no_folder_at_all_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(ConfigError, match="set TMPDIR"):
        private_folder("test")


def test_a_call_after_the_end_starts_no_new_ray() -> None:
    """A watcher that Ctrl-C left alone may look once more. Before the end, servers that no rank needs do not run."""
    code = (
        "import psutil\n"
        "from disagg.cluster.ray import local_ray\n"
        "with local_ray(1):\n"
        "    import ray\n"
        "    ref = ray.put(1)\n"
        "    ran = ' '.join(word for one in psutil.Process().children() for word in one.cmdline())\n"
        "if 'gcs_server' not in ran or 'monitor.py' in ran or 'dashboard.py' in ran:\n"
        "    raise SystemExit(ran)\n"
        "try:\n"
        "    ray.wait([ref])\n"
        "except ray.exceptions.RayError:\n"
        "    raise SystemExit(0 if not ray.is_initialized() else 7)\n"
        "raise SystemExit(8)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=PATIENCE_S)
    assert ended.returncode == 0
