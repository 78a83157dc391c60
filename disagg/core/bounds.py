"""Types of message fields with bounds that the decoder checks."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
"""Priority of a request: a lower number is earlier."""
Label = Annotated[str, msgspec.Meta(max_length=256)]
