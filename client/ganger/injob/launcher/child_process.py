"""The number of threads of OpenBLAS, which numpy brings, in a process that has it already.

A launcher imports numpy with one thread, for it has to stay a process of one thread.
"""

from __future__ import annotations

import ctypes

_NAMES = [f"{prefix}_set_num_threads{suffix}" for prefix in ("scipy_openblas", "openblas") for suffix in ("64_", "")]


def set_blas_threads(threads: int) -> None:
    """Let every OpenBLAS of this process compute with so many threads. Without effect where there is none."""
    for path in _libraries():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue  # removed since it was loaded
        for name in _NAMES:
            function = getattr(library, name, None)
            if function is not None:
                function(ctypes.c_int(threads))


def _libraries() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        lines = [line.rstrip("\n").split(None, 5) for line in maps if "openblas" in line]
    return sorted({fields[5] for fields in lines if len(fields) == 6 and ".so" in fields[5]})
