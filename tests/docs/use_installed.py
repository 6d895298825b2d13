"""Run by `nox -s package` in a clean environment: the installed package is whole, typed, and sums.

Usage: python use_installed.py FOLDER, where FOLDER is the environment that the package must have been imported from.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import torchdist_ref as dist


def main(folder: str) -> None:
    """Check what a user has after `pip install`."""
    home = Path(dist.__file__).resolve().parent
    assert home.is_relative_to(Path(folder).resolve()), f"imported from {home}, not from {folder}"
    assert (home / "py.typed").exists(), "py.typed is not in the package"
    assert (home / "device_mesh.pyi").exists(), "the stubs of torch's import paths are not in the package"
    assert dist.__version__ == version("torchdist_ref")
    from torchdist_ref.testing import run

    assert run(add_ranks, 2) == [3.0, 3.0]
    print(f"torchdist_ref {dist.__version__} from {home}: two ranks summed 1 and 2 to 3")


def add_ranks(rank: int) -> float:
    """Sum 1 and 2 over two ranks."""
    import torch

    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


if __name__ == "__main__":
    main(sys.argv[1])
