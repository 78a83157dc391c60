"""Garbage collection is off within the block, and afterwards as it was before."""

from __future__ import annotations

import gc

import pytest

from disagg.core.collection import collection_paused


def test_collection_is_off_within_the_block_only() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


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
