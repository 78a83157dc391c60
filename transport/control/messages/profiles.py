"""Messages of a profile, between a router and any rank."""

from __future__ import annotations

from disagg.core.bounds import Count
from disagg.core.profile.types import ProfileOptions, TraceSummary
from disagg.core.types import RequestKey
from transport.control.messages.base import Message


class Profile(Message, frozen=True):
    """Router -> rank: record the next steps. The rank replies with `ProfileProgress` at once and twice a second,
    then with `Profiled` or `ProfileFailed`."""

    key: RequestKey
    options: ProfileOptions


class ProfileProgress(Message, frozen=True):
    """Rank -> router: number of recorded steps so far."""

    key: RequestKey
    steps: Count


class Profiled(Message, frozen=True):
    """Rank -> router: the trace is written."""

    key: RequestKey
    summary: TraceSummary


class ProfileFailed(Message, frozen=True):
    """Rank -> router: the rank records nothing, or the recording has ended without a trace."""

    key: RequestKey
    code: str
    """The `code` of the error's class."""
    error: str
