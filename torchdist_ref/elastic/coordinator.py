"""Coordinator of the agents of a job, and the thread that redirects late agents to it.

One agent serves the store and runs the coordinator. Each agent pushes reports to a queue; the coordinator passes them
to a `Roster` and publishes its decisions under numbered keys, for which all agents wait. So nothing is polled but the
keep-alive keys, in the memory of the server, and a decision arrives within a millisecond. The server sets a key when
the connection of an agent ends; the coordinator looks for it when a keep-alive is late, and wakes up for that only.

Anybody who reaches the store can write to it (`agent_queues`). A report or decision that another program has deleted is
repeated: each keep-alive contains the agent's last report and the decision for which it waits. When a thread of the
coordinator fails, the agents are notified and choose another coordinator. Do not add rules here: they belong to
`roster` and `keep_alives`; an agent's side belongs to `session`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty

from torchdist_ref.elastic.agent_queues import MALFORMED, Welcomes, read_queue
from torchdist_ref.elastic.keep_alives import Finding, KeepAlives
from torchdist_ref.elastic.roster import Decision, HostInfo, Roster, Rules
from torchdist_ref.elastic.session import (
    GONE,
    HELLOS,
    KEEP_ALIVE_SECONDS,
    LONGEST_WAIT,
    PREFIX,
    REPORTS,
    SILENCE_SECONDS,
    WELCOME_SECONDS,
    CoordinatorLost,
    LocalLink,
    Message,
    authenticate,
    open_store,
    session_store,
)
from torchdist_ref.errors import AuthenticationError, DistError
from torchdist_ref.stores import PrefixStore, TCPStore
from torchdist_ref.stores.sealed import KEY_BYTES
from torchdist_ref.stores.served_values import ArrivedValues, ServedValues
from torchdist_ref.stores.tcp.server import TCPServer

REDIRECTION_SECONDS = 1.0
_FAREWELL_SECONDS = 5.0
_MEBIBYTE_OF_KEYS = 1024
log = logging.getLogger("torchdist_ref.elastic")


class AgentCoordinator:
    """Coordinator of the agents of a job, on a thread of its own.

    Args:
        store: Store that this process serves.
        roster: Rules and state of the job.
        secret: Job token; empty for none.
        address: Address of this host at which the others reach it, for the store of each attempt.
        own: Key of the agent of this process.
        forward: Host and port to which this coordinator sends all agents, since another one leads the job.

    Attributes:
        local: Link to the agent of this process.
    """

    def __init__(
        self,
        store: TCPStore,
        roster: Roster,
        secret: bytes,
        address: str,
        own: str,
        forward: tuple[str, int] | None = None,
    ) -> None:
        self._forward = forward
        self._store, self._roster, self._address, self._own = store.clone(), roster, address, own
        self._secret, self._nonce = secret, os.urandom(KEY_BYTES).hex()
        self._sealed = session_store(self._store, secret, self._nonce)
        served = ServedValues(self._store)
        self._pulses, self._gone = session_store(served, secret, self._nonce), PrefixStore(GONE, served)
        self._hellos_store, self._reports_store = store.clone(), store.clone()
        for waiting in (self._hellos_store, self._reports_store):
            waiting.set_timeout(LONGEST_WAIT)
        # A thread of its own waits for reports in the store, and passes them on here. The coordinator's thread wakes up
        # at other times too, and a wait in the store that ends by its time-out would cost a request each time.
        self.local = LocalLink()
        self._reports = self.local.reports
        self._plans, self._published = 0, dict[int, str]()
        self._serials: dict[str, int] = {}
        self._keep_alives = KeepAlives(SILENCE_SECONDS)
        self._own_joined, self._early = False, list[tuple[str, str, Message]]()
        self._job_store: TCPServer | None = None
        self._closing, self._closed = False, threading.Event()
        targets = {"welcome": self._welcome_agents, "reports": self._read_reports}
        self._threads = [
            threading.Thread(target=self._watch, args=(target,), name=f"torchdist_ref {name}", daemon=True)
            for name, target in targets.items()
        ]
        self._main = threading.Thread(target=self._run, name="torchdist_ref coordinator", daemon=True)
        self._threads.append(self._main)
        for thread in self._threads:
            thread.start()

    @property
    def deposed(self) -> bool:
        """Whether another agent may coordinate most hosts now."""
        return self._roster.deposed

    def close(self) -> None:
        """End the coordinator once it has handled all reports; if the job has ended, once all agents know that."""
        self._reports.put({"kind": "close", "key": "", "serial": 1})
        self._main.join(_FAREWELL_SECONDS)
        self._closed.set()
        for store in (self._hellos_store, self._reports_store, self._store):
            store.close()
        if self._job_store is not None:
            self._job_store.close()

    # Threads

    def _watch(self, target: Callable[[], None]) -> None:
        """Run a thread's function; the coordinator ends when it fails."""
        try:
            target()
        except Exception as error:
            self._reports.put(error)

    def _welcome_agents(self) -> None:
        """Tell each new agent this session's random number, and prove to know the job token."""
        welcomes = Welcomes(PrefixStore(PREFIX, self._hellos_store), self._secret, self._nonce)
        hellos = PrefixStore(PREFIX, ArrivedValues(self._hellos_store))
        read_queue(hellos, HELLOS, welcomes.answer, self._closed)

    def _read_reports(self) -> None:
        def put(report: bytes, is_first: bool) -> None:
            self._reports.put(_event(json.loads(report)))

        reports = session_store(ArrivedValues(self._reports_store), self._secret, self._nonce)
        read_queue(reports, REPORTS, put, self._closed, "ignored a report that no agent of this job has written")

    def _run(self) -> None:
        failure = ""
        try:
            while not self._closed.is_set() and not self._roster.deposed and not self._is_over():
                self._step()
        except Exception as error:
            if not self._closed.is_set():
                failure = f"the coordinator of the agents has failed: {error}"
                log.error(failure, exc_info=error)
        if self._roster.deposed:
            lost, count = self._roster.out_of_reach, len(self._roster.progress.hosts)
            failure = f"{len(lost)} of {count} hosts of the job are out of reach ({', '.join(lost)})"
            failure += ", and may go on without this one"
        if failure:
            # No agent may wait for a coordinator that decides nothing any more.
            with suppress(DistError):
                self._publish("deposed", {"text": failure})

    # Reports and decisions

    def _step(self) -> None:
        """Handle reports until the next time at which something is due, and publish what follows."""
        next_time = self._roster.next_time() if self._forward is None else float("inf")
        self._receive(max(min(next_time, self._next_check()) - time.monotonic(), 0.0))
        now = time.monotonic()
        # Before deciding, look at the keep-alives: another program may have popped a report from the queue, and the
        # decision may depend on it.
        if now >= min(next_time, self._next_check()):
            self._check_agents(now)
        # Another coordinator decides about a job that has moved.
        if self._forward is None:
            self._roster.tick(now)
        self._publish_decisions()

    def _is_over(self) -> bool:
        """Return whether no agent needs the coordinator any more."""
        if self._roster.ended:
            return not self._roster.seats and not self._roster.waiting
        return self._closing

    def _receive(self, seconds: float) -> None:
        """Handle the reports that arrive within a time, and all that are there already."""
        while not self._closed.is_set():
            try:
                event = self._reports.get(timeout=seconds)
            except Empty:
                break
            seconds = 0.0
            if isinstance(event, Exception):
                raise event
            self._accept(event)

    def _accept(self, event: Message) -> None:
        """Handle a report once: keep-alives repeat it, with the same serial number."""
        key, serial = event["key"], event["serial"]
        if serial > self._serials.get(key, 0):
            self._serials[key] = serial
            self._roster.now = time.monotonic()
            try:
                self._handle(event["kind"], key, event)
            except MALFORMED as error:
                log.warning("ignored a report that is malformed: %s", event, exc_info=error)

    def _handle(self, kind: str, key: str, event: Message) -> None:
        if kind == "join" and self._forward is not None:
            host, port = self._forward
            self._sealed.set(f"reply/{key}", json.dumps({"kind": "moved", "host": host, "port": port}))
        elif kind == "join" and not self._own_joined and key != self._own:
            # Its own host comes first, so that it is never refused in favor of another one.
            self._early.append((kind, key, event))
        elif kind == "join":
            self._roster.join(HostInfo(**event["info"]), Rules(**event["rules"]))
            early, self._early, self._own_joined = self._early, [], True
            for each in early:
                self._handle(*each)
        elif kind == "ready":
            self._roster.ready(key, event["attempt"])
        elif kind == "finish":
            self._roster.finish(key, event["attempt"])
        elif kind == "fail":
            self._roster.fail(key, event["attempt"], event["failure"])
        elif kind == "close":
            self._closing = True
        elif kind == "moved" and self._forward is None and event["attempt"] > self._roster.progress.attempt:
            self._forward = str(event["host"]), int(event["port"])
            self._publish("moved", {"host": event["host"], "port": event["port"]})
        elif kind == "leave" and self._roster.ended:
            self._roster.lose(key, "has left")
        elif kind == "leave" and key == self._own and self._roster.can_spare_one:
            self._publish("handover", {"text": "the host that coordinates the job leaves"})
            self._closing = True
        elif kind == "leave":
            self._roster.leave(key, event["text"])

    def _present(self) -> list[str]:
        """Return the agents to check: all but that of this process, which ends with the coordinator."""
        return [key for key in (*self._roster.seats, *self._roster.waiting) if key != self._own]

    def _next_check(self) -> float:
        """Return when to look at the keep-alives next."""
        return min(self._keep_alives.next_look(self._present()), time.monotonic() + LONGEST_WAIT.total_seconds())

    def _check_agents(self, now: float) -> None:
        """Remove agents that have disconnected, or whose keep-alive does not arrive any more."""
        present = self._present()
        states = list(map(self._state_of, present))
        for key, state, gone in zip(present, states, self._gone.multi_get(present), strict=True):
            finding = self._keep_alives.look(key, state.get("beat", -1), bool(gone), now)
            if finding is Finding.BEAT:
                if state["report"]:
                    self._accept(state["report"])
                self._repair_plans(state["next"])
            elif finding is Finding.DISCONNECTED:
                ended = self._has_ended(key)
                self._roster.lose(key, "has ended" if ended else "has left", certain=ended)
            elif finding is Finding.SILENT:
                silence = self._keep_alives.silence(key, now)
                self._roster.lose(key, f"has sent no keep-alive for {silence:.1f} s", certain=False)

    def _state_of(self, key: str) -> Message:
        """Return the content of an agent's last keep-alive; empty if another program has written or deleted it."""
        try:
            state = json.loads(self._pulses.multi_get([f"alive/{key}"])[0])
            report = state["report"] and _event(state["report"])
            return {"beat": int(state["beat"]), "next": int(state["next"]), "report": report}
        except MALFORMED:
            return {}

    def _repair_plans(self, first: int) -> None:
        """Write the decisions from number `first` on again where another program has changed or deleted them."""
        for number in range(max(first, self._plans - _MEBIBYTE_OF_KEYS), self._plans):
            key, text = f"plan/{number}", self._published[number]
            try:
                is_there = self._pulses.multi_get([key])[0] == text.encode()
            except AuthenticationError:
                is_there = False
            if not is_there:
                self._sealed.set(key, text)

    def _has_ended(self, key: str) -> bool:
        """Return whether an agent that has disconnected runs no more; it may have gone to another coordinator."""
        seat = self._roster.seats.get(key)
        if seat is None:
            return False
        try:
            open_store(seat.info.address, seat.info.port, KEEP_ALIVE_SECONDS).close()
        except CoordinatorLost as error:
            return error.certain
        return False

    def _publish_decisions(self) -> None:
        decisions, self._roster.decisions = self._roster.decisions, []
        for decision in decisions:
            decision = self._with_job_store(decision) if decision.kind == "start" else decision
            if decision.key:
                reply = decision.content | {"kind": decision.kind, "next": self._plans}
                self._sealed.set(f"reply/{decision.key}", json.dumps(reply))
            else:
                self._publish(decision.kind, decision.content)

    def _with_job_store(self, decision: Decision) -> Decision:
        """Serve a new store to the workers of each attempt, so that they find no key of an earlier one."""
        former, self._job_store = self._job_store, TCPServer(self._address, 0)
        if former is not None:
            former.close()
        where = {"master_addr": self._address, "master_port": self._job_store.port}
        return Decision("start", decision.content | where)

    def _publish(self, kind: str, content: Message) -> None:
        text = json.dumps(content | {"kind": kind})
        self.local.decisions.put(json.loads(text))
        self._published[self._plans] = text
        self._sealed.set(f"plan/{self._plans}", text)
        self._plans += 1
        if self._plans > _MEBIBYTE_OF_KEYS:
            oldest = self._plans - _MEBIBYTE_OF_KEYS - 1
            del self._published[oldest]
            self._sealed.delete_key(f"plan/{oldest}")


def _event(report: Message) -> Message:
    """Return a report whose key and serial number can be looked up."""
    return report | {"key": str(report["key"]), "serial": int(report["serial"])}


class Redirection:
    """Thread that redirects agents from the first address of a job to its present coordinator.

    An agent that is started again where the first coordinator ran would serve a rendezvous of its own there.

    Args:
        host: First address.
        port: Its port.
        secret: Job token; empty for none.
        info: Host that coordinates the job now.
        attempt: Function that returns the number of the present attempt.
    """

    def __init__(self, host: str, port: int, secret: bytes, info: HostInfo, attempt: Callable[[], int]) -> None:
        self._host, self._port, self._secret, self._info, self._attempt = host, port, secret, info, attempt
        self._key = os.urandom(8).hex()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchdist_ref redirection", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(REDIRECTION_SECONDS):
            with suppress(CoordinatorLost, DistError, *MALFORMED):
                self._redirect(open_store(self._host, self._port, KEEP_ALIVE_SECONDS))

    def _redirect(self, store: TCPStore) -> None:
        key, info = self._key, self._info
        try:
            where = f"{self._host}:{self._port}"
            nonce = authenticate(store, self._secret, info.host, where, WELCOME_SECONDS)
            message = {"kind": "moved", "key": key, "serial": time.time_ns(), "host": info.address, "port": info.port}
            message["attempt"] = self._attempt()
            session_store(store, self._secret, nonce).queue_push(REPORTS, json.dumps(message))
        finally:
            store.close()
