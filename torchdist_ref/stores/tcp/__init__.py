"""TCPStore: a store served by one process and reached over TCP, wire-compatible with torch's.

`store` has the public class, `client` its connections, `server` the server's sockets and thread, `requests` what the
server does with a request, `operations` the table of operations, and `protocol` the bytes. Do not add code here.
"""

from torchdist_ref.stores.tcp.store import TCPStore

__all__ = ["TCPStore"]
