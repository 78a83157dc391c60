"""Compiles kernels for Hopper, which needs no GPU, and looks at the PTX."""

from __future__ import annotations

import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import constexpr

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def compiled(
    kernel: Any, arguments: dict[str, Any], *, num_warps: int, num_stages: int = 3, fp_fusion: bool = True
) -> Any:
    """`arguments` by name: a dtype is a 16-byte aligned tensor of it, an int or float a number, what is spelled in
    upper case, a `constexpr` or None a constant. Kernels that may overlap with the previous one do so."""
    if "OVERLAP" in kernel.arg_names:
        arguments = {**arguments, "OVERLAP": True}
    names = list(arguments)
    signature, constants, aligned = {}, {}, {}
    for place, (name, value) in enumerate(arguments.items()):
        if name.isupper() or value is None or isinstance(value, constexpr):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.dtype):
            signature[name], aligned[(place,)] = f"*{_TYPES[value]}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                aligned[(place,)] = [["tt.divisibility", 16]]
    assert names == list(kernel.arg_names), "each of the kernel's arguments, in order"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fp_fusion}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def accesses_before_waiting(ptx: str) -> set[str]:
    """Kinds of accesses to global memory before the wait for the previous kernel, of which there must be one."""
    before, *rest = ptx.split("griddepcontrol.wait")
    assert len(rest) == 1
    assert "griddepcontrol.launch_dependents" not in before, (
        "the next kernel may read what this one waits for"
    )
    return set(re.findall(r"\b(ld\.global|st\.global|cp\.async|atom\.global|red\.global)", before))


def asynchronous_bytes(ptx: str) -> set[int]:
    """Widths of the copies from global to shared memory."""
    return {
        int(width, 16)
        for width in re.findall(r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], (0x\w+)", ptx)
    }
