"""Data at size: text is written to many shards, then made into a training set; seconds, tokens/s and memory.

    python benchmarks/data.py [--quick] [--gigabytes 10] [--tokenizer words] [--json OUT]

`--tokenizer words` makes text of words of up to 80 letters and looks them up, in place of the model's BPE, which takes ten minutes of
CPU time per GB and has no part in what memory does.

Memory is what the process holds by itself (RssAnon): pages of the mapped set are the file cache's and can be dropped at any
moment. It is watched while the set is made, and must not grow with the data: the peak of the whole is set against the peak of
the first tenth. Random access over the mapped set, in the order that training asks for, is timed too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from figures import Figure, arguments, report

ROOT = Path(__file__).resolve().parent.parent
SHARD_BYTES = 64 << 20
WORD, LONG_WORD = 9, 80  # letters at most


def vocabulary(longest: int) -> list[str]:
    rng = random.Random(1)
    return sorted({"".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, longest))) for _ in range(20000)})


def word_tokenizer() -> object:
    """Whole words of up to LONG_WORD letters, cut at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(["<unk>", "<end>", *vocabulary(LONG_WORD)])}
    bare = Tokenizer(models.WordLevel(vocab=ids, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>", eos_token="<end>")


def write_shards(folder: Path, size: int, kind: str, longest: int) -> int:
    """Text of random words in documents of about 2 kB, jsonl or parquet; returns the bytes of text."""
    rng, words = random.Random(0), vocabulary(longest)
    folder.mkdir(parents=True)
    total = shard = 0
    while total < size:
        rows, held = [], 0
        while held < min(SHARD_BYTES, size - total):
            text = " ".join(rng.choices(words, k=rng.randint(1200 // longest, 5000 // longest)))
            rows.append({"text": text})
            held += len(text)
        if kind == "jsonl":
            with (folder / f"part-{shard:04d}.jsonl").open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(rows), folder / f"part-{shard:04d}.parquet")
        total, shard = total + held, shard + 1
    return total


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def make(folder: Path, model: str, workers: int) -> dict:
    """In this process: make the set, watch the memory, then read samples in training order."""
    from karui.catalogue import load_tokenizer
    from karui.configs.recipe import DataSection
    from karui.trainers.data import collate, load_samples, plan_epoch

    tokenizer = word_tokenizer() if model == "words" else load_tokenizer(Path(model))
    section = DataSection(train=str(folder), format="text", max_length=1024, overlong="split", dedup=True, workers=workers)
    samples_of_memory: list[tuple[float, int]] = []
    done = threading.Event()
    rows = [0]

    def watch() -> None:
        while not done.wait(0.1):
            samples_of_memory.append((rows[0], anonymous_bytes(os.getpid())))

    thread = threading.Thread(target=watch)
    thread.start()
    begin, used = time.perf_counter(), time.process_time()
    found = load_samples(section, tokenizer, "train", progress=lambda n: rows.__setitem__(0, n))
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    done.set()
    thread.join()
    first = max(m for n, m in samples_of_memory if n <= found.counts.rows // 10 + 256)
    whole = max(m for _, m in samples_of_memory)
    begin = time.perf_counter()
    again = load_samples(section, tokenizer, "train")
    reopened = time.perf_counter() - begin
    plan = plan_epoch(again.lengths, batch=64, micro_tokens=8192)
    begin, tokens = time.perf_counter(), 0
    for k in range(min(200, len(plan))):
        tokens += sum(collate([again[i] for i in micro]).num_tokens for micro in plan[k])
    return {"seconds": seconds, "cpu": used + children_seconds(), "tokens": found.counts.tokens, "rows": found.counts.rows, "duplicates": found.counts.duplicates,
            "first": first, "whole": whole, "reopened": reopened, "read": tokens / (time.perf_counter() - begin)}


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--gigabytes", type=float, default=None, help="of text; default 2, with --quick 0.1")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kind", choices=["jsonl", "parquet"], default="parquet")
    parser.add_argument("--tokenizer", choices=["model", "words"], default="model")
    parser.add_argument("--inner", nargs=3, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inner:
        print(json.dumps(make(Path(given.inner[0]), given.inner[1], int(given.inner[2]))))
        return 0
    from karui.catalogue import resolve

    size = int((given.gigabytes or (0.1 if given.quick else 2.0)) * 1e9)
    with tempfile.TemporaryDirectory() as scratch:
        begin = time.perf_counter()
        text = write_shards(Path(scratch) / "shards", size, given.kind, LONG_WORD if given.tokenizer == "words" else WORD)
        print(f"{text / 1e9:.2f} GB of text written in {time.perf_counter() - begin:.0f} s", flush=True)
        env = {**os.environ, "KARUI_CACHE": scratch, "PYTHONPATH": str(ROOT)}
        tokenizer = "words" if given.tokenizer == "words" else str(resolve("smollm2-135m"))
        command = [sys.executable, __file__, "--inner", str(Path(scratch) / "shards"), tokenizer, str(given.workers)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            print(done.stderr[-3000:])
            return 1
        r = json.loads(done.stdout.splitlines()[-1])
    report([
        Figure(name="text made into a set", ours=text / 1e6 / r["seconds"], unit="MB/s", note=f"{given.kind}, {given.workers} workers"),
        Figure(name="CPU time per GB of text", ours=r["cpu"] / (text / 1e9), unit="s", note=f"tokenizer: {given.tokenizer}"),
        Figure(name="tokens made", ours=r["tokens"] / 1e3 / r["seconds"], unit="thousand tokens/s"),
        Figure(name="peak memory, the whole over its first tenth", ours=r["whole"] / r["first"], goal=1.25, better="lower", unit="ratio"),
        Figure(name="peak memory while making the set", ours=r["whole"] / 1e9, unit="GB"),
        Figure(name="opening the finished set again", ours=r["reopened"], unit="s", note="its source files are hashed"),
        Figure(name="samples read in training order", ours=r["read"] / 1e6, unit="million tokens/s"),
    ], given.json, text_bytes=text, tokens=r["tokens"], rows=r["rows"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
