"""Garbage collection is off within the block, and afterwards as it was before; imports are excluded for good."""

from __future__ import annotations

import gc

import pytest

from disagg.core.collection import collection_paused, imports_frozen


def test_collection_is_off_within_the_block_only() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_imports_are_excluded_before_a_collection_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[bool] = []
    monkeypatch.setattr("gc.freeze", lambda: enabled.append(gc.isenabled()))
    with imports_frozen():
        assert not enabled
    assert (enabled, gc.isenabled()) == ([False], True)
    with pytest.raises(ModuleNotFoundError), imports_frozen():
        import disagg.nowhere  # type: ignore[import-not-found]  # noqa: F401
    assert (enabled, gc.isenabled()) == ([False], True)


def test_an_import_that_fails_enables_it_again() -> None:
    with pytest.raises(ModuleNotFoundError), collection_paused():
        import disagg.nowhere  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_a_caller_that_disabled_it_finds_it_disabled() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
