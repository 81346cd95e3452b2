# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""What the overlay's classes replace in vLLM's has to be there. Imports nothing, for
series that come without the full-width cache."""

from collections.abc import Callable


def require(owner: object, name: str) -> None:
    """Refuse a vLLM whose class or object has no `name`, which the overlay replaces:
    its own would run instead.

    Raises:
        RuntimeError: one sentence.
    """
    cls = owner if isinstance(owner, type) else type(owner)
    declared = any(
        name in vars(base).get("__annotations__", {}) for base in cls.__mro__
    )
    if not hasattr(owner, name) and not declared:
        raise RuntimeError(
            f"{cls.__module__}.{cls.__name__} of this vLLM has no {name}, which "
            "vllm-dsv4-overlay replaces; "
            "scripts/apply-patches.sh --status says what differs from the release it "
            "is for."
        )


def overriding(*added: str) -> Callable[[type], type]:
    """Decorate a class derived from vLLM's: all that it defines, but for `added`, is
    there to be overridden."""

    def check(cls: type) -> type:
        ours = [
            base
            for base in cls.__mro__
            if base.__module__.startswith("vllm.dsv4_overlay.")
        ]
        theirs = next(base for base in cls.__mro__ if base not in ours)
        for name in {name for base in ours for name in vars(base)}.difference(added):
            if not name.startswith("__"):
                require(theirs, name)
        return cls

    return check
