"""From a path to an engine: open the folder, choose a runner, find the tokenizer and the end tokens, set up speculation."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError, nearest
from karui.inference.batch import Runner
from karui.inference.bundle.reader import Opened, open_model
from karui.inference.cache.kv import PACKED
from karui.inference.memory import parse_bytes
from karui.inference.models.config import ModelConfig, from_hf
from karui.inference.models.decoder import TorchRunner
from karui.inference.models.weights import nbytes
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.draft_model import RunnerDrafter, check_vocabulary
from karui.inference.speculative.factory import Speculator, check_draft
from karui.inference.speculative.target import TargetIdentity
from karui.kernels.kvquant import BITS, KVLevels, file_of
from karui.kernels.qtensor import QTensor
from karui.kernels.triton_support.driver import no_gpu

if TYPE_CHECKING:
    from karui.inference.engine import Engine

logger = logging.getLogger(__name__)

# Grids that a message offers, with their bits per weight, scales included.
FITTING = {"bf16": 16.0, "w8 or fp8": 8.1, "w4g128": 4.2, "w2g64": 2.3}
RunnerChoice = Literal["auto", "native", "triton", "torch"]
Parallel = Literal["tensor", "pipeline"]
_OPTIONS = ("device", "runner", "dtype", "bit_exact", "activation_bits", "speculation", "parallel", "weight_memory",
            "offload_to", "kv_dtype", "memory", "max_context", "max_tokens_per_step", "max_sequences", "block_size", "ahead")


def load(engine_class: type[Engine], path: str | Path, *, device: str = "auto", runner: RunnerChoice = "auto",
         dtype: str = "auto", bit_exact: bool = False, activation_bits: int | None = None,
         speculation: SpeculationConfig | str | None = None, parallel: Parallel | None = None,
         weight_memory: int | str | None = None, offload_to: str | Path | None = None, **options: Any) -> Engine:
    """An engine for `path`: a bundle, a model folder, or a name of the catalogue.

    Args:
        device: "cpu", "cuda", "cuda:1"; "auto": a GPU where there is one, unless the runner is native.
        runner: "native" (C++, CPU), "triton" (kernels and CUDA graphs, GPU), "torch" (the reference, any device) or "auto":
            native on a CPU, triton on a GPU, if it serves the model.
        dtype: of the torch runner; "auto": float32 on a CPU, bfloat16 on a GPU.
        bit_exact: results independent of batch, chunking and caches in every bit (the native runner always is).
        activation_bits: 8: activations are quantized where weights are, to int8 for integer grids on a CPU (the default there),
            to E4M3 for FP8 grids on a GPU; 16: they are not (the default on a GPU). What a grid asks for (w8a8) is done anyway.
        speculation: a `SpeculationConfig` or its short spelling, such as "ngram:8".
        parallel: "tensor" or "pipeline": the model lies on all ranks of the process group, each of which loads it so; torch
            runner, without speculation (`models.parallel`).
        weight_memory: what weights may take on the device, bytes or a text such as "4GiB". Layers beyond it are read in every
            step while others are computed: from a file on the CPU, from main memory on a GPU. Native and triton runners.
        offload_to: the folder of that file, on a fast disk; the system's temporary one when None.
        options: the arguments of `Engine`.
    """
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise KaruiError(f"engine: unknown option {unknown[0]!r}; valid: {', '.join(_OPTIONS)}.{nearest(unknown[0], _OPTIONS)}")
    spec = SpeculationConfig.parse(speculation) if isinstance(speculation, str) else speculation or SpeculationConfig()
    opened = open_model(find(path))
    config = from_hf(opened.config)
    device = str(_device(device, runner))
    if parallel is not None:
        if spec.method != "none" or runner not in ("auto", "torch") or bit_exact or activation_bits == 8 or weight_memory:
            raise UnsupportedError("a model on several ranks runs on the torch runner, without speculation, bit_exact, "
                                   "activation_bits=8 and weight_memory.")
        made = make_parallel(opened, config, parallel, device=device, dtype=dtype)
    else:
        made = make_runner(opened, config, device=device, choice=runner, dtype=dtype, bit_exact=bit_exact,
                           activation_bits=activation_bits, weight_memory=weight_memory, offload_to=offload_to,
                           kv_dtype=options.get("kv_dtype", "auto"))
    if options.get("kv_dtype") in BITS:
        _set_kv_levels(opened, made, options["kv_dtype"])
    tokenizer = load_tokenizer(opened.tokenizer_path)
    drafting = None
    if spec.method != "none":
        drafting = _speculation(spec, opened, config, made, tokenizer, device=device, choice=runner, options=options)
    return engine_class(made, tokenizer, eos_token_ids=end_tokens(opened, tokenizer), speculation=drafting,
                        dense_weight=lambda module: _dense(opened, module),
                        model="" if opened.manifest is None else TargetIdentity.of(opened, None).weights, **options)


def _set_kv_levels(opened: Opened, runner: Runner, kv_dtype: str) -> None:
    """Give the runner the levels that were fitted to this model's keys and values."""
    file = opened.path / file_of(kv_dtype)
    if type(runner) is not TorchRunner:
        raise UnsupportedError(f"kv_dtype {kv_dtype!r} is served by the torch runner alone; load the engine with runner='torch'.")
    if not file.is_file():
        raise KaruiError(f"kv_dtype {kv_dtype!r} needs levels fitted to this model, and {file} is not there: make them with "
                         f"karui kv-levels --format {kv_dtype}.")
    levels = KVLevels.load(file)
    if not levels.target:
        logger.warning("%s does not say which model it was made for", file)
    elif levels.target != TargetIdentity.of(opened, None).weights:
        raise KaruiError(f"{file} was made for other weights than those of {opened.path}; calibrate anew.")
    runner.set_kv_levels(levels)


def find(path: str | Path) -> Path:
    """A folder as it is; anything else is a name for the catalogue."""
    if Path(path).is_dir():
        return Path(path)
    from karui.catalogue import resolve

    return Path(resolve(str(path)))


def make_parallel(opened: Opened, config: ModelConfig, parallel: Parallel, *, device: str, dtype: str) -> Runner:
    """A runner for this rank's part of the model."""
    from karui.inference.models.parallel import PipelineRunner, TensorParallelRunner

    kinds = {"tensor": TensorParallelRunner, "pipeline": PipelineRunner}
    if parallel not in kinds:
        raise KaruiError(f"parallel {parallel!r} is not known; use tensor or pipeline.")
    where = _device(device)
    kept = _dtype(dtype, where)
    with _said_when_full(opened, where, kept):
        return kinds[parallel](config, dict(opened.weights()), where, kept)


def make_runner(opened: Opened, config: ModelConfig, *, device: str = "auto", choice: RunnerChoice = "auto", dtype: str = "auto",
                bit_exact: bool = False, activation_bits: int | None = None, weight_memory: int | str | None = None,
                offload_to: str | Path | None = None, kv_dtype: str = "auto") -> Runner:
    """The runner asked for, or the best one that can serve the model and has that format of the KV cache, with the reason
    logged."""
    if activation_bits not in (None, 8, 16):
        raise KaruiError(f"activation_bits must be 8 or 16, got {activation_bits}.")
    if choice not in ("auto", "native", "triton", "torch"):
        raise KaruiError(f"runner {choice!r} is not known; use auto, native, triton or torch.")
    where, limit = _device(device, choice), None if weight_memory is None else parse_bytes(weight_memory)
    if choice == "native" and where.type != "cpu":
        raise UnsupportedError(f"the native runner works on the CPU, not on {device}; use runner='auto' there.")
    if choice in ("auto", "native") and where.type == "cpu" and dtype == "auto":
        try:
            from karui.inference.models.native import CACHE_TYPES, NativeRunner

            if choice == "auto" and kv_dtype not in ("auto", *CACHE_TYPES):
                raise UnsupportedError(f"it keeps no keys in {kv_dtype}")
            made: Runner = NativeRunner(config, opened.weights(), activation_bits=activation_bits or 8, weight_memory=limit,
                                        offload_to=offload_to)
            if choice == "auto" and kv_dtype != "auto":
                made.kv_bytes_per_token(kv_dtype)  # raises for heads that the format does not fit
            logger.info("runner: native")
            return made
        except (ImportError, UnsupportedError) as error:
            if choice == "native":
                raise UnsupportedError(f"the native runner cannot serve {opened.path}: {error}") from error
            logger.info("runner: torch, because the native one cannot serve this model: %s", error)
    kept = _dtype(dtype, where)
    if choice == "triton" or (choice == "auto" and where.type == "cuda" and not bit_exact):
        from karui.inference.models.gpu import TritonRunner, unsuited

        reason = unsuited(config, where) or (f"keys in {kv_dtype}" if choice == "auto" and kv_dtype in PACKED else "")
        if choice == "triton" and (reason or bit_exact):
            raise UnsupportedError(f"the triton runner cannot serve {opened.path}: {reason or 'it has no bit-exact mode'}.")
        if not reason:
            logger.info("runner: triton")
            with _said_when_full(opened, where, kept, packed=True):
                return TritonRunner(config, dict(opened.weights()), where, kept, activation_bits=activation_bits or 16,
                                    weight_memory=limit)
        logger.info("runner: torch, because the triton one cannot serve this model: %s", reason)
    if limit is not None:
        raise UnsupportedError("weight_memory: the torch runner keeps all weights where it computes; the native and the triton "
                               "runner can read layers when their turn comes.")
    if activation_bits == 8:
        raise UnsupportedError("the torch runner computes with activations as they are; leave activation_bits out.")
    with _said_when_full(opened, where, kept):
        return TorchRunner(config, dict(opened.weights()), where, kept, bit_exact)


def _device(device: str, choice: str = "auto") -> torch.device:
    if device == "auto":
        device = "cuda" if choice != "native" and torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError:
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise KaruiError(f"device {device!r} is not known; use auto, cpu, cuda or cuda:1.")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise KaruiError(f"device {device!r}: {no_gpu()}")
    return where


def _dtype(dtype: str, where: torch.device) -> torch.dtype:
    dtypes = {"auto": torch.float32 if where.type == "cpu" else torch.bfloat16, "float32": torch.float32,
              "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in dtypes:
        raise KaruiError(f"dtype {dtype!r} is not known; use one of {', '.join(dtypes)}.{nearest(dtype, dtypes)}")
    return dtypes[dtype]


@contextlib.contextmanager
def _said_when_full(opened: Opened, where: torch.device, dtype: torch.dtype, packed: bool = False) -> Iterator[None]:
    """A GPU that is too small for the weights: how much they ask for, how much was free, and what would fit."""
    free, total = torch.cuda.mem_get_info(where) if where.type == "cuda" else (0, 0)
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked, count = 0.0, 0
        for w in opened.weights().values():
            size = math.prod(w.shape)
            count += size
            if isinstance(w, QTensor):
                asked += size * w.spec.bits_per_weight / 8 if packed else nbytes(w)
            else:
                asked += size * dtype.itemsize
        bits = 8 * 0.9 * free / count  # a tenth for the KV cache and a step's own tensors
        fitting = [name for name, needed in FITTING.items() if needed <= bits]
        fits = f"{fitting[0]} would fit" if fitting else "not even two bits would fit"
        raise UnsupportedError(
            f"{opened.path} does not fit on {where}: {count / 1e9:.2f} billion weights ask for {asked / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB were free, {bits:.1f} bits per weight: {fits} (karui quantize). "
            "Or end what else holds this GPU's memory, let layers come from main memory (weight_memory), or use device='cpu'."
        ) from error


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None (token ids only) when it holds none. Raises `CorruptError` when it cannot be read."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        logger.info("%s holds no tokenizer: prompts must be token ids", folder)
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers and tokenizers have no type of their own for a damaged file
        raise CorruptError(f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {error}).") from error


def end_tokens(opened: Opened, tokenizer: Any) -> list[int]:
    """End tokens by generation_config.json, else config.json, and the tokenizer's own. Raises `CorruptError` for others."""
    try:
        found = json.loads((opened.path / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except OSError:
        found = None
    except (ValueError, AttributeError) as error:
        raise CorruptError(f"{opened.path}: its generation_config.json cannot be read ({error}).") from error
    found = opened.config.get("eos_token_id") if found is None else found
    ids = [] if found is None else list(found) if isinstance(found, list) else [found]
    if wrong := [i for i in ids if not isinstance(i, int)]:
        raise CorruptError(f"{opened.path}: its eos_token_id holds {wrong[0]!r}; token ids were expected.")
    own = getattr(tokenizer, "eos_token_id", None)
    return sorted({*ids, *([] if own is None else [own])})


def _dense(opened: Opened, module: str) -> torch.Tensor:
    w = opened.weight(f"{module}.weight")
    return w.dequantize(torch.float32) if isinstance(w, QTensor) else w.float()


def _speculation(spec: SpeculationConfig, opened: Opened, config: ModelConfig, runner: Runner, tokenizer: Any, *, device: str,
                 choice: RunnerChoice, options: dict[str, Any]) -> Speculation:
    drafter = None
    if spec.method == "draft":
        assert spec.path is not None
        draft = open_model(find(spec.path))
        draft_config, other = from_hf(draft.config), load_tokenizer(draft.tokenizer_path)
        check_vocabulary(config.vocab_size, draft_config.vocab_size)
        if tokenizer is not None and other is not None:
            check_vocabulary(tokenizer.get_vocab(), other.get_vocab())
        model = make_runner(draft, draft_config, device=device, choice=choice)
        context = options.get("max_context") or min(config.max_context, draft_config.max_context, 8192)
        drafter = RunnerDrafter(model, max_context=context, max_sequences=options.get("max_sequences", 64))
    embed, embedding, packed_head = getattr(runner, "embed", None), None, None
    native: Any = runner
    if hasattr(runner, "embedding"):
        embedding = lambda: native.embedding  # noqa: E731 (asked for anew with each draft: weights may be swapped)
        packed_head = lambda: native.head  # noqa: E731
    elif spec.method == "eagle3" and embed is None:
        table = _dense(opened, "model.embed_tokens")

        def embed(tokens: torch.Tensor) -> torch.Tensor:
            return table[tokens.long()]
    heads = opened.path if spec.method in ("medusa", "eagle3") else None
    if heads is not None and not spec.any_target:
        check_draft(heads, spec.method, opened, tokenizer)

    def head() -> torch.Tensor:
        return _dense(opened, "model.embed_tokens" if config.tied else "lm_head")
    return Speculation(spec, Speculator(spec, config, heads=heads, embed=embed, head=head, embedding=embedding,
                                        packed_head=packed_head, drafter=drafter).new)
