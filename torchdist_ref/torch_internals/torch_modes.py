"""State of torch in which the library's own arithmetic runs, whatever modes the caller has entered.

A call that its caller waits for runs on the caller's thread, where autograd may record, inference mode, autocast or
`torch.device` may be active, or a `TorchDispatchMode`, a `TorchFunctionMode` or a transform of `torch.func` may see
each operation. None of them concerns what a collective does to memory. So backends, and all steps around them that
copy or reduce, run below these modes. There operations only change memory: nothing is recorded, and the versions by
which autograd notices changes stay as they are. So a tensor that requires a gradient, one that autograd has saved, and
one made under inference mode can be written, as torch's collectives do.

torch's dispatcher reads most modes from a set of keys of the thread at each operation. `outside_modes` replaces these
keys by fixed ones, and leaves the modes that are not among them: those that intercept functions in Python, which
`torch.device` is too, and inference mode, which marks new tensors. To enter it takes a microsecond. So `ref` runs most
calls without it: it works on views of memory of its own (`backends.ref.steps.Views`), of which autograd knows nothing,
and only asks `has_function_mode`, `dispatch_modes` and `transforms` whether others would see an operation on them.

The default dtype and deterministic algorithms are of the process, and cannot be left. So each tensor that the library
makes names its dtype, beside its device. Do not run functions of the user in here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from typing import Any

import torch

from torchdist_ref.torch_internals import torch_private

_FORCE: Callable[[Any, Any], AbstractContextManager[None]] = torch_private.FORCE_DISPATCH.bind()

has_function_mode: Callable[[], bool] = torch_private.FUNCTION_MODE_ENABLED.bind()
"""Return whether a mode intercepts functions of torch in Python on this thread."""
dispatch_modes: Callable[[], int] = torch_private.DISPATCH_MODES.bind()
"""Return how many modes intercept operations of torch on this thread."""
is_traced: Callable[[], bool] = torch_private.TRACED.bind()
"""Return whether ``torch.jit.trace`` runs."""
transforms: Callable[[], bool] = torch_private.TRANSFORMS.bind()
"""Return whether a transform of `torch.func` runs on this thread."""


def _keys() -> tuple[Any, ...]:
    """Return the dispatch keys that are active, and those that are left out, below all modes."""
    if not (torch_private.DISPATCH_KEYS.exists() and torch_private.DISPATCH_KEY.exists()):
        # The guard is missing in such a torch too, and says so where it is entered.
        return ()
    of, key = torch_private.DISPATCH_KEYS.get(), torch_private.DISPATCH_KEY.get()
    # Factories need this one.
    active = of(key.BackendSelect)
    left = of(key.AutogradFunctionality) | of(key.AutogradOther) | of(key.AutogradNestedTensor)
    # Each type of device has a key of autocast, and the default is to leave all of them out.
    for name in filter(lambda name: name.startswith("Autocast"), dir(key)):
        left |= of(getattr(key, name))
    return active, left | of(key.ADInplaceOrView)


# Not computed at first use: torch's compiler, which reads programs with collectives, warns of caches.
_KEYS = _keys()


class outside_modes(ContextDecorator):  # noqa: N801 - used as a function, and as a decorator
    """Context in which no mode of the caller affects an operation of torch.

    >>> import torch
    >>> from torchdist_ref.torch_internals.torch_modes import outside_modes
    >>> leaf = torch.ones(2, requires_grad=True)
    >>> with torch.inference_mode(), torch.device("meta"), outside_modes():
    ...     _ = leaf.add_(torch.empty(2).fill_(2))
    >>> leaf, leaf._version
    (tensor([3., 3.], requires_grad=True), 0)
    """

    def __enter__(self) -> None:
        """Leave the modes."""
        self._others, self._guard = ExitStack(), _FORCE(*_KEYS)
        try:
            if torch.is_inference_mode_enabled():
                self._others.enter_context(torch.inference_mode(False))
            if has_function_mode():
                self._others.enter_context(torch_private.WITHOUT_FUNCTION_MODES.get()())
            # After the others, since inference mode changes some of the keys.
            self._guard.__enter__()
        except BaseException:
            self._others.close()
            raise

    def __exit__(self, *raised: Any) -> None:
        """Return to them."""
        self._guard.__exit__(None, None, None)
        self._others.close()

    def _recreate_cm(self) -> outside_modes:
        """Return a new context for each call of a decorated function, which several threads may make."""
        return type(self)()
