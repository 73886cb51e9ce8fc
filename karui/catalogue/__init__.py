"""Names, hub ids, GGUF files and folders, all turned into one thing: an ordinary Hugging Face folder on disk.

    from karui.catalogue import resolve
    folder = resolve("smollm2-135m")          # config.json, model.safetensors, tokenizer.json, ...; offline after the first time

Where models are kept: `$KARUI_CACHE`, else `~/.cache/karui`. The import is lean: no torch, no transformers.
"""

from karui.catalogue.entries import CATALOGUE, Entry, entries
from karui.catalogue.helpers import load_causal_lm, load_config, load_model_config, load_tokenizer
from karui.catalogue.resolver import resolve

__all__ = ["CATALOGUE", "Entry", "entries", "load_causal_lm", "load_config", "load_model_config", "load_tokenizer", "resolve"]
