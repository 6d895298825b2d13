"""Stores: small dictionaries shared by all ranks, through which they find each other.

`Store` is the interface. `HashStore` is in the memory of one process, `FileStore` in a file, `TCPStore` at a server.
`PrefixStore` is a namespace of another store. Do not add process groups here, or an import of torch.
"""

from torchdist_ref.stores.base import Store
from torchdist_ref.stores.file import FileStore
from torchdist_ref.stores.hash import HashStore
from torchdist_ref.stores.prefix import PrefixStore
from torchdist_ref.stores.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
