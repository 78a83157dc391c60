"""Asks a rank for a profile, and yields its replies."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence

from disagg.core.errors import InvalidRequestError, PeerLostError, RequestTimeoutError, error_from_code
from disagg.core.profile.types import ProfileRequest, TraceSummary
from disagg.core.types import GroupInfo, RankInfo, RequestKey
from disagg.router.response_dispatcher import ResponseDispatcher
from transport.control import messages as m

GRACE_S = 180.0
"""Time for the end of a recording and for its summary, after the time limit of the steps."""


async def record_profile(
    dispatcher: ResponseDispatcher, groups: Sequence[GroupInfo], request: ProfileRequest
) -> AsyncGenerator[int | TraceSummary, None]:
    """Yields the number of steps recorded so far at each progress report of the rank, then the summary.

    Raises `InvalidRequestError` for a group or rank that does not exist, the error of the rank, `PeerLostError`, or
    `RequestTimeoutError`. If the caller ends the generator early, the recording continues to its end.
    """
    group, rank = _rank_of(groups, request)
    addresses = {group.leader.control_address, rank.control_address}
    key = RequestKey(f"profile-{secrets.token_hex(8)}")
    limit_s = request.options.limit_s + GRACE_S
    until_s = time.monotonic() + limit_s
    with dispatcher.open(key) as inbox:
        dispatcher.send(rank.control_address, m.Profile(key, request.options))
        while True:
            try:
                # No `timeout` around the loop: several tasks may take turns at the generator.
                peer, message = await asyncio.wait_for(inbox.get(), until_s - time.monotonic())
            except TimeoutError as exc:
                raise RequestTimeoutError(
                    f"{group.name} r{rank.rank} did not reply for {limit_s:g} s"
                ) from exc
            match message:
                case m.ProfileProgress():
                    yield message.steps
                case m.Profiled():
                    yield message.summary
                    return
                case m.ProfileFailed():
                    raise error_from_code(message.code, message.error)
                case PeerLostError() if peer in addresses:
                    raise message


def _rank_of(groups: Sequence[GroupInfo], request: ProfileRequest) -> tuple[GroupInfo, RankInfo]:
    """Returns the requested rank and its group: the group of the requested name, else the first group of the
    requested role, by default one that decodes."""
    names = ", ".join(sorted(group.name for group in groups)) or "none"
    if request.group is not None:
        fitting = [group for group in groups if group.name == request.group]
    else:
        roles = (request.role,) if request.role is not None else ("decode", "colocated")
        fitting = sorted((group for group in groups if group.role in roles), key=lambda group: group.name)
    if not fitting:
        wanted = request.group or request.role or "decode"
        param = "group" if request.group is not None else "role"
        raise InvalidRequestError(f"no group {wanted!r} is up; the groups are: {names}", param=param)
    group = fitting[0]
    ranks = [rank for rank in group.ranks if rank.rank == request.rank]
    if not ranks:
        raise InvalidRequestError(
            f"{group.name} has no rank {request.rank}, only 0 to {len(group.ranks) - 1}", param="rank"
        )
    return group, ranks[0]
