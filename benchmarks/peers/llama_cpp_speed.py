"""Speed of llama.cpp on a GGUF file, without the Python sampling overhead of llama-cpp-python's high-level API.

    pip install llama-cpp-python        # builds llama.cpp; ~25 minutes on 2 cores, so use a venv that is kept
    python llama_cpp_speed.py MODEL.gguf --text TEXT --threads 2 [--quantize Q4_0 OUT.gguf]

Prints tokens/s: prefill of 512, decode after 8 and after 512 tokens. Run it and the product in turn, on the same machine.
"""

import argparse
import ctypes
import time

import llama_cpp as L
import numpy as np

FTYPES = {"Q4_0": L.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": L.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_K_M": L.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def quantize(source: str, name: str, target: str) -> None:
    params = L.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FTYPES[name], True
    assert L.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) == 0


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    ap.add_argument("--text", required=True)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--quantize", nargs=2, metavar=("TYPE", "OUT"))
    a = ap.parse_args()
    quiet = L.llama_log_callback(lambda *_: None)  # must outlive every call below
    L.llama_log_set(quiet, ctypes.c_void_p(0))
    L.llama_backend_init()
    if a.quantize:
        quantize(a.model, *a.quantize)
        a.model = a.quantize[1]
    model = L.llama_model_load_from_file(a.model.encode(), L.llama_model_default_params())
    cp = L.llama_context_default_params()
    cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_threads, cp.n_threads_batch = 2048, 512, 512, a.threads, a.threads
    ctx = L.llama_init_from_model(model, cp)
    vocab = L.llama_model_get_vocab(model)
    size = L.llama_vocab_n_tokens(vocab)
    text = open(a.text, "rb").read()[:6000]
    buf = (L.llama_token * 4096)()
    L.llama_tokenize(vocab, text, len(text), buf, 4096, False, False)

    def step(tokens: list[int]) -> int:
        arr = (L.llama_token * len(tokens))(*tokens)
        assert L.llama_decode(ctx, L.llama_batch_get_one(arr, len(tokens))) == 0
        return int(np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, -1), (size,)).argmax())

    for _ in range(a.repeats):
        rates = []
        for prompt in (512, 8):
            L.llama_memory_clear(L.llama_get_memory(ctx), True)
            t = time.perf_counter()
            tok = step(list(buf[:prompt]))
            first = time.perf_counter() - t
            t = time.perf_counter()
            for _ in range(128):
                tok = step([tok])
            rates += [prompt / first, 128 / (time.perf_counter() - t)]
        print(f"prefill512 {rates[0]:.0f}  decode@512 {rates[1]:.1f}  decode@8 {rates[3]:.1f}")


if __name__ == "__main__":
    main()
