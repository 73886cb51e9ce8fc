"""Two lazy loaders over a model folder, so that callers need not import transformers at start-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_config(path: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a model or bundle folder; `KaruiError` when absent, `CorruptError` when not JSON."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise KaruiError(
            f"{file.parent}: no config.json, so this is not a model folder; give a folder that transformers can load, "
            "a catalogue name (`karui models`) or a hub id."
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"{file}: not valid JSON ({error}); fetch or export the model again.") from error
    if not isinstance(config, dict):
        raise CorruptError(f"{file}: expected a JSON object, got {type(config).__name__}.")
    return config


def load_model_config(path: str | Path) -> Any:
    """The transformers config of a model folder; `KaruiError` for a bundle, a folder without one and a type it does not know."""
    from transformers import AutoConfig

    if (Path(path) / "manifest.json").is_file():
        raise UnsupportedError(f"{path} is a karui bundle, already quantized; give the model folder it was made of.")
    load_config(path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the values of a config are checked by a zoo of types
        raise KaruiError(f"{path}: transformers cannot read config.json ({type(error).__name__}: {error}).") from error


def load_causal_lm(path: str | Path, **options: Any) -> Any:
    """The causal language model of a folder through transformers: local files, safetensors only, no remote code.

    Args:
        options: of `from_pretrained`, such as dtype.

    Raises:
        CorruptError: a weight file that cannot be read, or weights that are missing or of another shape than config.json says;
            transformers would draw them at random.
        KaruiError: no model that transformers knows.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    load_model_config(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **options)
    except SafetensorError as error:
        raise CorruptError(f"{path}: a weight file cannot be read: {error}. Fetch the model again.") from error
    except (OSError, ValueError) as error:
        raise KaruiError(f"model {path} cannot be loaded: {error}") from error
    model, found = loaded
    other = [f"{name} {tuple(stored)}, expected {tuple(wanted)}" for name, stored, wanted in found["mismatched_keys"]]
    if wrong := sorted(found["missing_keys"]) + sorted(other):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CorruptError(f"{path}: weights that config.json asks for are missing or misshapen: {'; '.join(wrong[:3])}{more}. "
                           "Fetch or export the model again.")
    return model


def has_recurrent_layers(config: Any) -> bool:
    """Whether a transformers config has layers with a recurrent state: short convolutions, linear attention, state spaces."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return any(kind in ("conv", "linear_attention", "mamba") for kind in kinds)


def take_batches(model: Any) -> None:
    """Give a transformers model attention for batches of rows: sdpa, or eager where there is no other (soft caps, sinks)."""
    model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The fast tokenizer of a model or bundle folder, read from local files only and without remote code."""
    folder = Path(path)
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise KaruiError(f"{folder}: no tokenizer.json; copy the tokenizer files of the model it came from into the folder.")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise a zoo of types for a broken file
        raise CorruptError(f"{folder}: the tokenizer cannot be read ({type(error).__name__}: {error}).") from error
