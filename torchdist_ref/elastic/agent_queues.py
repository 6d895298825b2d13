"""Queues in which agents write to the coordinator, read among whatever other programs write there.

Anybody who reaches the store can write to it. A value that no agent of the job has sealed is ignored, and delays the
values behind it by microseconds (`ArrivedValues`). Do not add reactions to reports here: they belong to `coordinator`.
"""

from __future__ import annotations

import json
import logging
import threading
from _operator import _compare_digest as same_code
from collections.abc import Callable

from torchdist_ref.elastic.roster import versions
from torchdist_ref.elastic.session import derive_key, hello_code
from torchdist_ref.errors import AuthenticationError, QueueEmptyError, StoreTimeoutError
from torchdist_ref.membership.trust import SECRET_FILE
from torchdist_ref.stores import Store
from torchdist_ref.stores.sealed import SealedStore

MALFORMED = (AuthenticationError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of a value that another program has written."""
_ANSWERED_HELLOS = 4096
log = logging.getLogger("torchdist_ref.elastic")


def read_queue(
    store: Store, queue: str, handle: Callable[[bytes, bool], None], closed: threading.Event, warning: str = ""
) -> None:
    """Handle the first value of a queue, then those that have arrived behind it, and so on until the end.

    Args:
        store: Store above an `ArrivedValues`.
        queue: Key of the queue.
        handle: Function that gets a value, and whether it was the first; it may get a value as a later one before.
        closed: Event that ends this.
        warning: Line for the log when a value is ignored that no agent has written.
    """
    is_first = True
    while not closed.is_set():
        try:
            handle(store.queue_pop(queue, is_first), is_first)
        except QueueEmptyError:
            is_first = True
            continue
        except StoreTimeoutError:
            continue
        except MALFORMED:
            # Warn once: if a program pushes thousands of values, a log line for each would delay the agents' reports.
            if warning:
                log.warning(warning)
            warning = ""
        is_first = False


class Welcomes:
    """Answers to new agents: each learns the random number of the session, and that the job token is known here.

    Args:
        store: Part of the store that belongs to agents.
        secret: Job token; empty for none.
        nonce: Random number of the session.
    """

    def __init__(self, store: Store, secret: bytes, nonce: str) -> None:
        self._store, self._secret, self._nonce = store, secret, nonce
        self._answered = dict[str, None]()
        self._warning = (
            f"refused a connection from a program that does not know this job's token. If a host is missing, "
            f"its log has the same error: on all hosts, name a file with the same secret in {SECRET_FILE}."
        )

    def answer(self, hello: bytes, is_first: bool) -> None:
        """Answer a hello, once; those without the job token only when they are the first of the queue."""
        text, _, code = hello.decode().partition(" ")
        nonce = bytes.fromhex(text).hex()
        is_of_job = same_code(code, hello_code(self._secret, nonce))
        # An agent with another job token learns from the answer that the tokens differ. It is answered once its hello
        # is the first of the queue, so that a flood of such hellos does not delay agents of the job.
        if nonce in self._answered or not (is_first or is_of_job):
            return
        if self._warning and not is_of_job:
            log.warning(self._warning)
            self._warning = ""
        self._answered[nonce] = None
        if len(self._answered) > _ANSWERED_HELLOS:
            del self._answered[next(iter(self._answered))]
        welcome = SealedStore(self._store, derive_key(self._secret, b"welcome", nonce))
        welcome.set(f"welcome/{nonce}", json.dumps({"nonce": self._nonce, "versions": versions()}))
