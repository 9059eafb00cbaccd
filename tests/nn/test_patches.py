"""Patches of torch's private parts have their effect on the torch that is installed."""

from __future__ import annotations

from torch._inductor import cpp_builder

from sheeplike.nn.patches import optimize_less


def test_the_compiler_optimizes_less() -> None:
    optimize_less()
    flags, _ = cpp_builder._get_optimization_cflags("g++")
    assert {"O2", "O3"} & set(flags) == {"O2"}
