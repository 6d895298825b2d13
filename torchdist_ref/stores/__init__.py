"""Stores: the small shared dictionary through which ranks find each other.

`Store` says what all stores do; `HashStore` lives in one process, `FileStore` in a file, `TCPStore` behind a
socket, and `PrefixStore` is a part of another store. This package knows nothing of groups, and does not import torch.
"""

from torchdist_ref.stores.base import Store
from torchdist_ref.stores.file import FileStore
from torchdist_ref.stores.hash import HashStore
from torchdist_ref.stores.prefix import PrefixStore
from torchdist_ref.stores.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
