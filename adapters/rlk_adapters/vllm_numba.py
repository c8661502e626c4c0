"""Lets numba and vLLM's CPU engine live in one process.

vLLM 0.32 (``triton_utils/dispatcher.py``, ``_rebind_kernels``) reads ``__dict__`` of everything
that any module holds when an engine starts. The library handle of llvmlite, which numba imports,
answers every attribute with a foreign function, and the engine dies of ``'_lib_fn_wrapper' object
has no attribute 'get'``. Our kernel uses numba, so a second engine in a captured process would not
start. Goes away with a vLLM that skips what has no ``__dict__`` of its own.
"""

from __future__ import annotations


def give_library_a_dict() -> None:
    """Have llvmlite's library handle answer ``__dict__`` with an empty dict."""
    from llvmlite.binding import ffi  # type: ignore[import-untyped]

    # its table of functions is asked before the library is
    ffi.lib._fntab.setdefault("__dict__", {})
