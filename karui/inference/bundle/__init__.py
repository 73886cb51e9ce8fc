"""Bundles: a quantized model as a folder that says what it is.

    open_model(path)            a bundle or a plain model folder, lazily: .config, .weights(), .packed(name), .tokenizer_path
    read(path, verify="full")   a bundle only, every hash checked
    write(target, weights, ...) read back by an independent decoder, through the parity gate, then renamed into place
    export_model(source, ...)   merge an adapter, quantize, write

The format: `karui.configs.manifest.FORMAT`.
"""

from karui.inference.bundle.export import ExportReport, export_model
from karui.inference.bundle.reader import Bundle, ModelFolder, Opened, is_bundle, open_model, read, read_model_folder
from karui.inference.bundle.writer import Parity, write

__all__ = [
    "Bundle",
    "ExportReport",
    "ModelFolder",
    "Opened",
    "Parity",
    "export_model",
    "is_bundle",
    "open_model",
    "read",
    "read_model_folder",
    "write",
]
