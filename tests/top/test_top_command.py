"""`disagg top` as a command."""

from __future__ import annotations

import pytest

from disagg.cli import app as cli


def test_ctrl_c_ends_the_view_silently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("disagg.top.watch.watch", interrupted)
    assert cli.run(["top", "--url", "http://127.0.0.1:1"]) == 0
    assert capsys.readouterr().err == ""
