"""Kinds of kernels and operators, by name."""

from __future__ import annotations

import re

COPIES, OTHER = "copies", "other"
_OURS = {
    "attention": "decode_kernel prefill_kernel join_kernel",
    "matrix products": "few_rows_kernel one_row_kernel dequantize_kernel",
    "rotary and KV": "write_kernel",
    "sampling": "penalise_kernel count_kernel likeliest_kernel forbid_kernel draw_kernel",
    COPIES: "block_kernel quantize_kernel _move_kernel",
    "communication": "rank_sum_kernel",
}
"""Names of our own kernels that fit no pattern, or that of another kind."""
_PATTERNS = {
    "communication": r"nccl|all_?reduce|all_?gather|reduce_scatter|broadcast_kernel",
    "attention": r"attention|attn|flash|fmha|paged",
    "recurrent": r"gated_delta|state_space|conv",
    "experts": r"expert|moe",
    "norms": r"norm",
    "matrix products": r"gemm|gemv|matmul|cutlass|cublas|nvjet|splitk|linear|::(add)?mm$|::bmm$|::addmv$",
    "rotary and KV": r"rotary|rope|kv_cache",
    "sampling": r"sampl|softmax|argmax|argmin|topk|sort|multinomial|random|uniform|cumsum|searched|bincount",
    COPIES: r"copy|memcpy|memset|gather|scatter|index|::cat$|catarray|fill|::to$|::clone$|::item$",
    "elementwise": r"silu|elementwise|reduce|::(add|mul|sub|div|where|eq|lt|gt|ge|le)_?$",
}
_BY_NAME = {name: kind for kind, names in _OURS.items() for name in names.split()}
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS.items())
KINDS = (*_PATTERNS, OTHER)
"""All kinds. A name that fits several patterns belongs to the first of them."""


def kind_of(name: str) -> str:
    """Returns the kind of a kernel or operator."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    lowered = name.lower()
    return next((kind for kind, pattern in _COMPILED if pattern.search(lowered)), OTHER)
