"""``python -m torchdist_ref.testing.simulated_device`` compiles the device, unless that is done."""

from __future__ import annotations

import sys

from torchdist_ref.testing.simulated_device.building import BuildError, build

if __name__ == "__main__":
    try:
        print(build())  # noqa: T201
    except BuildError as error:
        sys.exit(str(error))
