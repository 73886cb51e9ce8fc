"""The compiled library through ctypes: the C structures mirrored, and a loaded `Library` per instruction set.

ctypes releases the GIL during a call, so other Python threads run while a step computes.
"""

from __future__ import annotations

import ctypes as C
import logging
from functools import cache
from typing import Any, ClassVar

import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.kernels.native.build import build, chosen_isa

log = logging.getLogger(__name__)

QUANTIZED, NF4, FP32, FP16, BF16, E2M1 = range(6)
PLAIN, LOOKUP, EAGLE3, MEDUSA = range(4)
"""Who drafts in rounds.h."""
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "relu2": 2}
"""`Activation` of ops.h."""
CACHE_TYPES = {"float32": 0, "float16": 1, "int8": 2, "kivi4": 3, "kivi2": 4}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT_TARGETS = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", *TARGETS[3:], "q_a_proj")
"""The same of latent attention; its first is q_b_proj where there is a q_a_proj."""
NUM_TARGETS = len(LATENT_TARGETS)


class Linear(C.Structure):
    """`Linear` of weights.h."""

    _fields_ = [(n, C.c_int32) for n in ("kind", "bits", "n", "k", "k_padded", "group", "block", "per_token", "act_bits",
                                         "scale_fp32", "zero", "padding")] + [
        (n, C.c_void_p) for n in ("codes", "scales", "zeros", "bias", "table")]


class Layer(C.Structure):
    """`Layer` of model.cpp."""

    _fields_ = [(n, Linear) for n in ("q", "k", "v", "o", "gate", "up", "down")] + [
        (n, C.c_void_p) for n in ("input_norm", "post_norm", "q_norm", "k_norm", "attended_norm", "fed_norm", "o_norm",
                                  "down_norm")] + [
        (n, C.c_int64) for n in ("rope", "window", "spilled_at", "spilled_bytes")] + [
        (n, C.c_void_p) for n in ("mixture", "sinks", "latent")]


class Mixture(C.Structure):
    """`Mixture` of mixture.h."""

    _fields_ = [(n, C.c_int32) for n in ("experts", "chosen", "shared", "sigmoid", "normalized", "activation", "groups",
                                         "groups_kept", "group_best", "padding")] + [
        (n, C.c_float) for n in ("scaling", "share_eps", "share_min", "alpha", "limit", "residual")] + [
        (n, C.c_void_p) for n in ("router", "shared_gate", "correction", "expert")]


class Latent(C.Structure):
    """`Latent` of latent.h."""

    _fields_: ClassVar[Any] = [
        *((n, C.c_int32) for n in ("rank", "rope", "nope", "value", "query_rank", "group", "out_group", "rounded")),
        ("scale", C.c_float), ("padding", C.c_int32), *((n, Linear) for n in ("down", "fold", "unfold")),
        *((n, C.c_void_p) for n in ("fold_scale", "fold_shift", "query_norm", "norm", "indexer")), ("top", C.c_int64)]


class Indexer(C.Structure):
    """`Indexer` of indexer.h."""

    _fields_: ClassVar[Any] = [
        *((n, C.c_int32) for n in ("heads", "dim", "top", "padding")), *((n, Linear) for n in ("q", "k", "weights")),
        *((n, C.c_void_p) for n in ("norm", "bias"))]


class Config(C.Structure):
    """`Config` of model.cpp."""

    _fields_ = [(n, C.c_int32) for n in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab",
                                         "max_threads", "rotary_dim", "row_norm", "activation", "centred", "parallel",
                                         "norm_turned")] + [
        (n, C.c_float) for n in ("eps", "rope_factor", "embed_scale", "query_scale", "residual_scale", "logit_factor",
                              "attention_cap", "logit_cap")] + [
        (n, C.c_void_p) for n in ("inv_freq", "local_inv_freq", "final_norm", "embedding", "head", "layer")] + [
        ("file", C.c_int64)]


class Batch(C.Structure):
    """`Batch` of model.cpp."""

    _fields_ = [(n, C.c_int32) for n in ("tokens_n", "sequences", "table_width", "wanted", "aux_n", "block_size", "groups",
                                         "padding")] + [
        (n, C.c_void_p) for n in ("tokens", "positions", "slots", "query_starts", "context_lens", "block_tables", "rows", "tree",
                                  "adapters", "aux_layers", "cosine", "sine", "logits", "hidden", "aux")]


class Lora(C.Structure):
    """`Lora` of model.cpp."""

    _fields_ = [("rank", C.c_int32), ("padding", C.c_int32), ("a", C.c_void_p), ("b", C.c_void_p), ("row_scale", C.c_void_p)]


class Drafter(C.Structure):
    """`Drafter` of draft.h."""

    _fields_: ClassVar[Any] = [
        *((n, C.c_int32) for n in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "aux")), ("eps", C.c_float),
        ("padding", C.c_int32), *((n, Linear) for n in ("fc", "q", "k", "v", "o", "gate", "up", "down", "head")),
        *((n, C.c_void_p) for n in ("inv_freq", "embedding_norm", "stream_norm", "post_norm", "final_norm", "ids"))]


class Draft(C.Structure):
    """`Draft` of draft.h."""

    _fields_ = [(n, C.c_int32) for n in ("rows", "past", "depth", "width", "nodes")] + [("least", C.c_float)] + [
        (n, C.c_void_p) for n in ("tokens", "positions", "aux", "keys", "values", "out_tokens", "out_parents", "out_log_probs")]


class Medusa(C.Structure):
    """`Medusa` of medusa.h."""

    _fields_ = [(n, C.c_int32) for n in ("hidden", "heads", "layers", "vocab", "projections", "padding")] + [
        (n, C.c_void_p) for n in ("blocks", "projection", "ids")]


class Stream(C.Structure):
    """`Stream` of rounds.h: one sequence."""

    _fields_ = [(n, C.c_int32) for n in ("length", "known", "left", "reach", "ends_n", "pending", "settled", "padding")] + [
        (n, C.c_void_p) for n in ("ends", "tokens", "aux", "keys", "values", "after", "positions")]


class Rounds(C.Structure):
    """`Rounds` of rounds.h: one call."""

    _fields_ = [(n, C.c_int32) for n in ("sequences", "table_width", "block_size", "aux_n", "method", "most", "gain", "adapt",
                                         "nodes", "depth", "width", "n_min", "n_max")] + [("least", C.c_float)] + [
        (n, C.c_void_p) for n in ("block_tables", "adapters", "aux_layers", "drafter", "medusa", "odds", "streams", "depths",
                                  "accepted", "seconds")]


class Library:
    """One compiled library; `isa` names its instruction set."""

    def __init__(self, isa: str) -> None:
        self.isa = isa
        lib = C.CDLL(str(build(isa)))
        p, i = C.c_void_p, C.c_int
        for name, result, arguments in (
            ("karui_sizes", i, [i]), ("karui_pack", None, [p, i, i, i, i, p]), ("karui_model", p, [p]), ("karui_free", None, [p]),
            ("karui_configure", i, [p, p]), ("karui_allocate", i, [p, C.c_int64, i, i, i, p]), ("karui_forward", i, [p, p]),
            ("karui_rounds", i, [p, p]), ("karui_draft", i, [p, p, p]), ("karui_medusa", i, [p, p, p]),
            ("karui_copy_slots", i, [p, p, p, i]), ("karui_settle", None, [p, p, i]), ("karui_move_units", None, [p, p, i, p, i]),
            ("karui_move_slots", None, [p, p, i, p, p, i]), ("karui_set_loras", None, [p, p, i]),
            ("karui_linear", None, [p, p, i, p]),
            ("karui_decode_rows", None, [p, p, i, p]), ("karui_argmax", None, [p, i, i, p]),
            ("karui_top_k", None, [p, i, i, i, p, p]), ("karui_choose", None, [p, i, i, p]),
            ("karui_threads", i, [p]), ("karui_sample", None, [p, i, i, p, p, p]),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("karui_"), function)
        for which, structure in enumerate((Linear, Layer, Config, Batch, Lora, Drafter, Draft, Stream, Rounds, Medusa, Mixture,
                                            Latent, Indexer)):
            assert self.sizes(which) == C.sizeof(structure), f"{structure.__name__} differs between C++ and Python"

    def __getattr__(self, name: str) -> Any:  # only for type checkers: functions are set in __init__
        raise AttributeError(name)


@cache
def load(isa: str | None = None) -> Library:
    """The library for `isa` (default: `chosen_isa()`), compiled if need be. Raises `UnsupportedError` when that fails."""
    return _load(isa or chosen_isa())


@cache
def _load(isa: str) -> Library:
    try:
        return Library(isa)
    except OSError as error:
        raise UnsupportedError(f"the native kernels could not be loaded: {error}") from error


@cache
def unavailable() -> str | None:
    """Why the native kernels cannot serve here, or None when they can. Logged once."""
    try:
        load()
    except KaruiError as error:
        log.warning("native kernels are not available, the torch path serves: %s", error)
        return str(error)
    return None


def available() -> bool:
    """Whether the native kernels can be used; compiles them on the first call."""
    return unavailable() is None


def address(t: torch.Tensor | None) -> int | None:
    """The data pointer of a contiguous CPU tensor; the caller keeps the tensor alive."""
    if t is None:
        return None
    assert t.is_contiguous() and t.device.type == "cpu"
    return t.data_ptr()
