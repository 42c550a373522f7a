"""The structures that the native kernels take, field by field as their headers declare them."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


class Product(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int64),
        ("inner", c_int64),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("columns", c_int64),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("ending", c_int32),
        ("format", c_int32),
        ("threads", c_int32),
    )


class Pack(ctypes.Structure):
    _fields_ = (
        ("parts", c_void_p),
        ("part_rows", c_void_p),
        ("num_parts", c_int64),
        ("inner", c_int64),
        ("gated", c_int32),
        ("format", c_int32),
        ("threads", c_int32),
        ("packed", c_void_p),
        ("scales", c_void_p),
    )


class Gate(ctypes.Structure):
    _fields_ = (
        ("gate_up", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("threads", c_int32),
    )


class Norm(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("eps", c_float),
        ("threads", c_int32),
    )


class Rotate(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("heads", "cos", "sin", "q_norm", "k_norm", "k_pages", "v_pages")),
        ("slots", c_void_p),
        *((name, c_int64) for name in ("rows", "q_heads", "kv_heads", "head_dim")),
        ("eps", c_float),
        ("threads", c_int32),
    )


class Step(ctypes.Structure):
    _fields_ = (("kind", c_int64), ("job", c_void_p), ("seconds", c_double))


class Fused(ctypes.Structure):
    _fields_ = (
        ("steps", c_void_p),
        ("num_steps", c_int64),
        ("rows", c_int64),
        ("widest", c_int64),
        ("threads", c_int32),
    )


class Attend(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "k_pages", "v_pages", "out", "lse")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "page_tokens", "segments")),
        *((name, c_void_p) for name in ("q_start", "q_stop", "paged_tokens", "table_row", "table")),
        ("table_stride", c_int64),
        *((name, c_void_p) for name in ("context", "context_end", "history")),
        ("scale", c_float),
        ("threads", c_int32),
    )


STORE, ADD, GATE = 0, 1, 2
"""How a product ends."""


class Format(IntEnum):
    """What a product brings rows and weights to. Numbers as in `native/products.h`."""

    BFLOAT16 = 0
    INT16 = 1
    INT8 = 2


STEPS = {"norm": 0, "product": 1, "rotate": 2}
"""Kernels that may be a step of several that run together, by their number there."""

Job = Norm | Product | Rotate
"""What such a step takes."""
