"""Environment, ports, and the one macro that command lines know."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from string import Template
from typing import Any

from torchdist_ref.errors import ArgumentError, DistNetworkError

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]


def get_env_variable_or_raise(env_name: str) -> str:
    """Read an environment variable that has to be there.

    Args:
        env_name: Its name.

    Returns:
        Its value.

    Raises:
        ArgumentError: It is not set.

    Example:
        >>> import os
        >>> from torchdist_ref.elastic.utils import get_env_variable_or_raise
        >>> os.environ["EXAMPLE_OF_A_VARIABLE"] = "7"
        >>> get_env_variable_or_raise("EXAMPLE_OF_A_VARIABLE")
        '7'
    """
    value = os.environ.get(env_name)
    if value is None:
        raise ArgumentError(
            f"Environment variable {env_name} expected, but not set. Launchers set it; see the page Environment."
        )
    return value


def get_socket_with_port() -> socket.socket:
    """Open a socket on a free port of this machine, so that nobody else gets the port while it is open.

    Returns:
        The listening socket, on the address that ``localhost`` means. Close it just before the port is used.

    Raises:
        DistNetworkError: No port could be had.

    Example:
        >>> from torchdist_ref.elastic.utils import get_socket_with_port
        >>> with get_socket_with_port() as held:
        ...     held.getsockname()[1] > 1023
        True
    """
    trouble: OSError | None = None
    for family, kind, protocol, _, _ in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM):
        held = socket.socket(family, kind, protocol)
        try:
            held.bind(("localhost", 0))
            held.listen(0)
        except OSError as error:
            held.close()
            trouble = error
        else:
            return held
    raise DistNetworkError(f"get_socket_with_port: no free port on localhost could be opened: {trouble}.")


class macros:
    """Words in the arguments of a command that a launcher replaces for each rank.

    Attributes:
        local_rank: The word that stands for the rank on its machine.
    """

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Iterable[Any], local_rank: str) -> list[Any]:
        """Replace the words.

        Args:
            args: The arguments; those that are not text stay as they are.
            local_rank: What to put for `local_rank`.

        Returns:
            The arguments of one rank.

        Example:
            >>> from torchdist_ref.elastic.utils import macros
            >>> macros.substitute(["--rank", "${local_rank}", 5, "$HOME"], "3")
            ['--rank', '3', 5, '$HOME']
        """
        return [Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg for arg in args]
