"""TCPStore: a store served by one process and reached over TCP, wire-compatible with torch's.

`store` has the public class and `client` its connections. `server` has the server's loop and its clients' sockets, and
`requests` what the server does with a request: run it, or let it wait for keys. Both sides share `operations`, the
table of operations, and `protocol`, the bytes. Do not add code here.
"""

from torchdist_ref.stores.tcp.store import TCPStore

__all__ = ["TCPStore"]
