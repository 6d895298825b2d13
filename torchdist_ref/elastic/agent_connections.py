"""Connections of one host's agent: the stores and the coordinator that it serves, and its session with a coordinator.

`host_agent` decides when to lead, join, succeed and leave; the methods here do it. Do not add decisions here.
"""

from __future__ import annotations

from collections.abc import Callable

from torchdist_ref.elastic.agent_settings import AgentSettings
from torchdist_ref.elastic.coordinator import AgentCoordinator, Redirection
from torchdist_ref.elastic.roster import HostInfo, Progress, Roster
from torchdist_ref.elastic.session import WELCOME_SECONDS, AgentSession, CoordinatorLost, open_store
from torchdist_ref.errors import ArgumentError, DistNetworkError
from torchdist_ref.membership.trust import CURES
from torchdist_ref.stores import TCPStore
from torchdist_ref.stores.addresses import is_loopback, local_ends
from torchdist_ref.timeouts import CLOCK

LOOPBACK_CURE = "For other hosts, give an address of the first host in --rdzv-endpoint or --master-addr."
# Time in which all survivors notice that the coordinator is silent.
_SUCCESSION_SECONDS = 0.9


class AgentConnections:
    """Connections of an agent.

    Args:
        settings: Settings of this host.
        name: Name of this host, for messages.
        wake: Descriptor of an eventfd that is written when a decision has arrived, or the coordinator is lost.
        log: Function that receives lines for the user.
    """

    def __init__(self, settings: AgentSettings, name: str, wake: int, log: Callable[[str], None]) -> None:
        self._settings, self._name, self._wake, self._log = settings, name, wake, log
        self._served: TCPStore | None = None
        self._standby: TCPStore | None = None
        self._coordinator: AgentCoordinator | None = None
        self._forwarder: AgentCoordinator | None = None
        self._redirection: Redirection | None = None
        self._session: AgentSession | None = None
        self._own_address = settings.local_addr

    def lead(self, key: str, is_new: bool) -> AgentSession | None:
        """Serve the rendezvous at the job's first address, coordinate the job, and join it.

        Args:
            key: Key of this agent.
            is_new: Whether this host has not taken part in the job yet.

        Returns:
            The session; None if another process has to serve the rendezvous.

        Raises:
            ArgumentError: This host has to serve the rendezvous of a new job, and cannot.
        """
        settings = self._settings
        if (store := self._serve(must=is_new)) is None:
            return None
        self._log_reach()
        info = self._describe(key, settings.host)
        roster = Roster(settings.rules, CLOCK.now(), info.key)
        self._coordinator = AgentCoordinator(store, roster, settings.secret, settings.host, info.key)
        return self._join(store.clone(), info, f"{settings.host}:{settings.port}")

    def join(
        self, host: str, port: int, key: str, seconds: float, welcome_seconds: float = WELCOME_SECONDS
    ) -> AgentSession:
        """Join the coordinator at an address.

        Args:
            host: Its host.
            port: Port of its store.
            key: Key of this agent.
            seconds: Longest time to connect.
            welcome_seconds: Longest time to wait for its answer.

        Raises:
            CoordinatorLost: No coordinator answers at the address.
            CoordinatorMoved: Another agent coordinates the job.
        """
        info = self._describe(key, self._address())
        return self._join(open_store(host, port, seconds), info, f"{host}:{port}", welcome_seconds)

    def succeed(
        self, key: str, progress: Progress, gone: frozenset[str], attempt: Callable[[], int]
    ) -> tuple[HostInfo, AgentSession]:
        """Coordinate the job at this host's standby store, and join it.

        Args:
            key: Key of this agent.
            progress: State of the job.
            gone: Keys of the hosts that have certainly ended.
            attempt: Function that returns the number of the present attempt.

        Returns:
            This host and its session.
        """
        info, settings = self._describe(key, self._address()), self._settings
        assert self._standby is not None
        roster = Roster(settings.rules, CLOCK.now(), key, progress, gone, _SUCCESSION_SECONDS)
        self._coordinator = AgentCoordinator(self._standby, roster, settings.secret, info.address, key)
        self._redirection = Redirection(settings.host, settings.port, settings.secret, info, attempt)
        self._log(f"{self._name} coordinates the job now")
        return info, self._join(self._standby.clone(), info, f"{info.address}:{info.port}")

    def forward(self, host: str, port: int) -> None:
        """Redirect agents from the job's first address to its coordinator, if that address is this host's."""
        if self._served is None and (store := self._serve()) is not None:
            roster = Roster(self._settings.rules, CLOCK.now())
            self._forwarder = AgentCoordinator(store, roster, self._settings.secret, host, "", (host, port))

    def is_own(self, host: HostInfo) -> bool:
        """Return whether a host of the last attempt is this one."""
        own = self._standby.port if self._standby is not None else 0
        return (host.address, host.port) == (self._address(), own)

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this host reaches the address that it was given, which may be a name that /etc/hosts maps so."""
        return is_loopback(self._settings.host) or (not self._settings.local_addr and is_loopback(self._address()))

    def leave(self) -> None:
        """End everything that belongs to the present coordinator."""
        for part in (self._session, self._forwarder, self._coordinator, self._redirection, self._served):
            if part is not None:
                part.close()
        self._session = self._forwarder = self._coordinator = self._redirection = self._served = None

    def close(self) -> None:
        """End all threads and close the stores."""
        self.leave()
        if self._standby is not None:
            self._standby.close()

    def _serve(self, must: bool = False) -> TCPStore | None:
        """Return the store at the job's first address; None if another process has to serve it."""
        settings = self._settings
        if settings.serves is False:
            return None
        try:
            self._served = TCPStore(settings.host, settings.port, is_master=True, wait_for_workers=False)
        except DistNetworkError as error:
            if settings.serves and must:
                raise ArgumentError(f"{self._name} cannot serve the rendezvous: {error}") from error
        return self._served

    def _join(
        self, store: TCPStore, info: HostInfo, where: str, welcome_seconds: float = WELCOME_SECONDS
    ) -> AgentSession:
        settings = self._settings
        local = self._coordinator.local if self._coordinator is not None else None
        try:
            self._session = AgentSession(
                store, info, settings.rules, settings.secret, where, self._wake, self._log, welcome_seconds, local
            )
        except BaseException:
            # If this process serves the store, the server occupies its port until the last store object is closed.
            store.close()
            raise
        return self._session

    def _describe(self, key: str, address: str) -> HostInfo:
        settings = self._settings
        if self._standby is None:
            self._standby = TCPStore(self._address(), 0, is_master=True, wait_for_workers=False)
        port = self._standby.port
        return HostInfo(key, self._name, address, port, settings.workers, settings.node_rank, settings.role)

    def _address(self) -> str:
        """Return the address of this host at which the others reach it."""
        if not self._own_address:
            found = [address for _, address in local_ends(self._settings.host)]
            # /etc/hosts may map the name of this host to loopback and to an interface.
            self._own_address = next((each for each in found if not is_loopback(each)), *found[:1] or [""])
        if not self._own_address:
            raise CoordinatorLost(f"{self._name} has no route to {self._settings.host}, or cannot resolve it", False)
        return self._own_address

    def _log_reach(self) -> None:
        host = self._settings.host
        if not self.is_on_loopback:
            if not self._settings.secret:
                self._log(f"without a job token, any program that reaches {host} can join this job. {CURES}")
        elif not is_loopback(host):
            self._log(f"{host} is a loopback address here, which only this host reaches. {LOOPBACK_CURE}")
