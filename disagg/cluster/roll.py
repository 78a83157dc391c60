"""Replaces all groups of a running cluster by groups with changed settings (`disagg roll`), without failed requests.

    request -> new settings of each role -> decide (`roll_plan`) -> start, or drain and end -> decide -> ...

The steps run on the supervisor's thread, so that dead groups are replaced in between: old ones with their settings,
new ones with theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from disagg.cluster.group import Group
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.ranks import NoRoomError
from disagg.cluster.roll_plan import AwaitRestart, EndRoll, RetireOld, RollState, StartNew, decide
from disagg.cluster.settings import GroupSettings, new_cluster_needed, rolled_names
from disagg.cluster.supervisor import ROLLING, WAIT_S, Supervisor
from disagg.core.config.read import Config, Role, Setting
from disagg.core.errors import ConfigError, DisaggError, HandshakeError
from transport.control import messages as m

log = structlog.get_logger(__name__)

KNOWN_TIMEOUT_S = 30.0
"""Time for every router to use a new group. A router that is silent for `control.peer_timeout_s` does not count."""

MOST_DEATHS = 1
"""Number of deaths among a role's groups with new settings that a roll tolerates. More are taken as an effect of the
settings."""

Prepare = Callable[[Config], tuple[Config, str]]
"""Function that checks the model of a configuration. Returns the configuration with the model's commit, and the
fingerprint of the model's files. Raises `ConfigError`."""
Send = Callable[[m.Message], None]


class RouterList(Protocol):
    """The part of the directory that a roll uses."""

    def wait_known(self, names: Sequence[str], timeout_s: float) -> tuple[str, ...]:
        """Waits until every connected router uses these groups; returns the routers that do not."""


class Roller:
    """Runs the rolls of a cluster, one at a time. Thread-safe."""

    def __init__(
        self, cluster: Cluster, supervisor: Supervisor, routers: RouterList, prepare: Prepare
    ) -> None:
        self._cluster, self._supervisor, self._routers = cluster, supervisor, routers
        self._prepare = prepare
        self._rolls: dict[str, _Roll] = {}
        """Rolls that have not ended, by operator; one runs, further ones will be refused."""

    def begin(self, operator: str, request: m.Roll, send: Send) -> None:
        """Schedules a roll; `send` gets a `RollStep` for each step, and a `Rolled` at the end. Never blocks."""
        if operator in self._rolls:
            send(m.Rolled(ROLLING))
            return

        def finished(reply: m.Rolled) -> None:
            self._rolls.pop(operator, None)
            log.info("roll_ended", error=reply.error, new=reply.new, old=reply.old)
            send(reply)

        roll = _Roll(self._cluster, self._supervisor, self._routers, request, send)
        self._rolls[operator] = roll
        self._supervisor.begin(lambda: roll.run(self._prepare, finished), lambda why: finished(m.Rolled(why)))

    def stop(self, operator: str) -> None:
        """Ends the roll of this operator, if any, as soon as the usual number of groups serves. Never blocks."""
        if roll := self._rolls.get(operator):
            roll.stop()


class _RollError(DisaggError):
    """Ends a roll; the message is for the operator."""


class _Roll:
    """One roll. All methods but `stop` run on the supervisor's thread."""

    def __init__(
        self, cluster: Cluster, supervisor: Supervisor, routers: RouterList, request: m.Roll, send: Send
    ) -> None:
        self._cluster, self._supervisor, self._routers = cluster, supervisor, routers
        self._request, self._send = request, send
        self._targets: dict[Role, GroupSettings] = {}
        """New settings by role, in the order of the roll."""
        self._left: list[Role] = []
        """Roles that are not complete."""
        self._most_room = request.max_surge
        """Upper limit of the groups of this role that start at once. Lowered when they do not all fit, although the
        free resources suggest so."""
        self._to_restore = 0
        """Number of groups that were ended before their replacements have started."""
        self._waited_s = 0.0
        """Time that the roll has waited for the supervisor since its latest action."""
        self._stopped, self._spare_start = False, False

    def stop(self) -> None:
        """Stops the roll; cancels the start of a group that is not needed. Callable from any thread."""
        self._stopped = True
        if self._spare_start:
            self._cluster.cancel_start()

    def run(self, prepare: Prepare, finished: Callable[[m.Rolled], None]) -> float | None:
        """Runs one step; returns the pause before the next one, or None after the last. Calls `finished` at the
        end."""
        try:
            if not self._targets:
                self._prepare(prepare)
            pause_s = self._step(self._left[0]) if self._left else None
        except DisaggError as error:
            finished(self._ended(str(error)))
            return None
        except Exception as error:
            finished(self._ended(f"{type(error).__name__}: {error}"))
            raise
        if pause_s is None:
            finished(self._ended(""))
        return pause_s

    # --- new settings

    def _prepare(self, prepare: Prepare) -> None:
        kinds = list(self._cluster.placement.kinds)
        if unknown := [role for role in self._request.kinds if role not in kinds]:
            raise ConfigError(f"this cluster has no {unknown[0]} groups, only {' and '.join(kinds)}")
        changes = [
            Setting(one.section, one.key, one.value, one.origin, text=False) for one in self._request.settings
        ]
        roles = [role for role in kinds if role in (self._request.kinds or kinds)]
        targets = {role: self._target(role, changes, prepare) for role in roles}
        self._say_changes(targets)
        self._targets, self._left = targets, roles

    def _target(self, role: Role, changes: Sequence[Setting], prepare: Prepare) -> GroupSettings:
        """Returns the new settings of the role. Raises `ConfigError` for a change that needs a new cluster."""
        before = self._cluster.settings[role]
        target = before.changed(changes)
        old, new = before.configured.model, target.configured.model
        if (old.path, old.revision) != (new.path, new.revision):
            config, fingerprint = prepare(target.configured)
            self._require_same_model(fingerprint, f"the model in {new.path}")
            target = GroupSettings(role, config, target.placement)
        if target.where.tp != before.where.tp and (groups := self._serving(role)):
            from disagg.model.tensor_parallel import check_tp

            check_tp(groups[0].spec, {role: target.where.tp})
        return target

    def _require_same_model(self, fingerprint: str, what: str) -> None:
        if any(info.fingerprint != fingerprint for info in self._cluster.infos()):
            raise new_cluster_needed(
                f"{what} has other weights or another configuration than the groups, which"
            )

    def _say_changes(self, targets: dict[Role, GroupSettings]) -> None:
        changed: dict[str, str] = {}
        others: dict[str, None] = {}
        for role, target in targets.items():
            before = self._cluster.settings[role].configured
            names, rest = rolled_names(before, target.configured)
            others.update(dict.fromkeys(rest))
            for name in names:
                section, _, key = name.partition(".")
                if section != role and section in self._cluster.placement.kinds:
                    continue  # of groups of another role
                values = [getattr(getattr(config, section), key) for config in (before, target.configured)]
                changed[name] = f"{name} = {values[1]!r} (was {values[0]!r})"
        if changed:
            self._say(f"changes: {', '.join(changed.values())}")
        if others:
            self._say(
                f"not changed by a roll: {', '.join(others)}; restart the routers or `disagg launch`, and for the "
                f"number of groups use `disagg scale`"
            )

    # --- steps

    def _step(self, role: Role) -> float | None:
        """Runs the next action of the role; returns the pause before the next step, None after the last one."""
        self._require_living(role)
        state = self._state(role)
        action = decide(state)
        if not isinstance(action, AwaitRestart):
            self._waited_s = 0.0
        match action:
            case StartNew():
                self._start(role, action)
            case RetireOld():
                self._retire(role, action)
            case AwaitRestart():
                return self._wait(role)
            case EndRoll():
                if action.error:
                    raise _RollError(action.error)
                self._say(f"{role}: all groups have the new settings")
                self._cluster.keep_settings(self._targets[role], complete=True)
                self._left.remove(role)
                self._most_room = self._request.max_surge
        return 0.0 if self._left else None

    def _require_living(self, role: Role) -> None:
        """Ends the roll if more than `MOST_DEATHS` groups with the new settings have died.

        Groups with the old settings replace the dead ones, and the new ones that die later. New groups beyond the
        usual number end.
        """
        died = [group for group in self._supervisor.died(role) if self._is_new(group)]
        if len(died) <= MOST_DEATHS:
            return
        serving, wanted = self._serving(role), self._cluster.wanted(role)
        new = [group for group in serving if self._is_new(group)]
        if spare := new[len(new) - max(0, len(serving) - wanted) :]:
            self._supervisor.retire(spare, self._drain_timeout_s(role))
        for group in new:
            group.successor = self._cluster.settings[role]
        self._supervisor.limit_restarts(role, 0)
        self._to_restore = max(0, wanted - len(serving))
        self._restore(role)
        raise _RollError(
            f"{len(died)} {role} groups with the new settings have died, the last one because "
            f"{died[-1].why_lost}; groups with the old settings take their places"
        )

    def _state(self, role: Role) -> RollState:
        target, serving = self._targets[role], self._serving(role)
        old = [group for group in serving if not self._is_new(group)]
        self._limit_restarts(role)
        restarts = [settings.digest == target.digest for settings in self._supervisor.restarting(role)]
        return RollState(
            role=role,
            wanted=self._cluster.wanted(role),
            old=tuple(group.name for group in old),
            new=len(serving) - len(old),
            restarting=len(restarts) if self._stopped else restarts.count(True),
            room=min(self._most_room, self._cluster.room(target)),
            max_surge=self._request.max_surge,
            allow_pause=self._request.allow_pause,
            stopped=self._stopped,
        )

    def _start(self, role: Role, action: StartNew) -> None:
        groups = "a group" if action.count == 1 else f"{action.count} groups"
        self._say(f"{role}: starting {groups} with the new settings")
        self._spare_start = action.spare
        self._cluster.keep_settings(self._targets[role], complete=False)
        try:
            new = self._supervisor.add(role, action.count, self._targets[role])
        except DisaggError as error:
            if isinstance(error, NoRoomError) and action.spare and not self._stopped:
                # `room` is an upper bound: the next step tries fewer groups; for none, it drains an old group first
                self._most_room = action.count // 2
                return
            self._restore(role)
            raise self._explained(role, error) from error
        finally:
            self._spare_start = False
        self._require_known(role, new)
        self._limit_restarts(role)
        self._to_restore = 0

    def _explained(self, role: Role, error: DisaggError) -> _RollError:
        if self._stopped:
            return _RollError("the operator has stopped the roll")
        if isinstance(error, HandshakeError):
            return _RollError(f"the new settings need a new cluster: {error}")
        return _RollError(f"a {role} group with the new settings does not start: {error}")

    def _require_known(self, role: Role, new: Sequence[Group]) -> None:
        """Waits until all routers use the new groups. Otherwise ends the groups and the roll."""
        names = [group.name for group in new]
        unknown = self._routers.wait_known(names, KNOWN_TIMEOUT_S)
        lost = [group for group in new if group not in self._cluster.groups]
        if lost:  # the supervisor starts it again, and the plan waits
            self._say(f"{role}: {lost[0].name} has ended: {lost[0].why_lost}")
        elif why := self._mixed_models(new) or (unknown and f"router {unknown[0]} does not use {names[0]}"):
            self._supervisor.retire(new, self._drain_timeout_s(role))
            self._restore(role)
            raise _RollError(f"{why}: see the logs")
        else:
            self._say(f"{role}: {' and '.join(names)} {'serves' if len(names) == 1 else 'serve'}")

    def _mixed_models(self, new: Sequence[Group]) -> str:
        """Returns an error if the new groups have read other files than the old ones. Colocated groups are not
        linked, so no handshake compares them."""
        if len({info.fingerprint for info in self._cluster.infos()}) == 1:
            return ""
        return (
            f"{new[0].name} has read other files than the older groups: start a new cluster for another model"
        )

    def _limit_restarts(self, role: Role) -> None:
        """Cancels restarts that would lead to more than the usual number of groups."""
        self._supervisor.limit_restarts(role, self._cluster.wanted(role) - len(self._serving(role)))

    def _restore(self, role: Role) -> None:
        """Replaces groups that were ended before the replacements had started by groups with the old settings."""
        for _ in range(self._to_restore):
            self._supervisor.start_again(role, self._cluster.settings[role])
        self._to_restore = 0

    def _retire(self, role: Role, action: RetireOld) -> None:
        names = " and ".join(action.names)
        if action.first:
            why = "no device is free for another group" if self._request.max_surge else "--max-surge is 0"
            self._say(f"{role}: {why}: {names} ends before its replacement starts")
            self._to_restore = 1
        else:
            self._say(f"{role}: draining {names}")
        groups = [group for group in self._cluster.groups if group.name in action.names]
        self._supervisor.retire(groups, self._drain_timeout_s(role))
        self._say(f"{role}: {names} {'has' if len(action.names) == 1 else 'have'} ended")

    def _wait(self, role: Role) -> float:
        if not self._waited_s:
            self._say(f"{role}: a group with the new settings has died, waiting for its replacement")
        self._waited_s += WAIT_S
        if self._stopped:
            raise _RollError("the operator has stopped the roll")
        if self._waited_s > (limit_s := self._targets[role].configured.cluster.start_timeout_s):
            raise _RollError(
                f"a {role} group with the new settings has died, and its replacement does not serve after "
                f"{limit_s:g} s (cluster.start_timeout_s)"
            )
        return WAIT_S

    # --- state of the cluster

    def _serving(self, role: Role) -> list[Group]:
        groups = self._cluster.groups
        return [one for one in groups if one.role == role and one.up and not one.leaving and not one.lost]

    def _is_new(self, group: Group) -> bool:
        digest = self._targets[group.role].digest
        return group.info is not None and group.info.settings_digest == digest

    def _drain_timeout_s(self, role: Role) -> float:
        return self._targets[role].configured.transfer.drain_timeout_s

    def _ended(self, error: str) -> m.Rolled:
        serving = [group for role in self._targets for group in self._serving(role)]
        new = tuple(group.name for group in serving if self._is_new(group))
        return m.Rolled(error, new, tuple(group.name for group in serving if group.name not in new))

    def _say(self, text: str) -> None:
        log.info("roll_step", step=text)
        self._send(m.RollStep(text))
