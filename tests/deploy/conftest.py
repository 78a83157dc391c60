"""Each overlay is rendered once; every test gets a copy of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
from manifest_model import Rendered, render

_render = functools.cache(render)


@pytest.fixture
def rendered() -> Callable[[str], Rendered]:
    """Renders an overlay, named by its folder under deploy/k8s; what it returns may be changed."""
    return lambda overlay: copy.deepcopy(_render(overlay))
