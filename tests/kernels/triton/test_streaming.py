"""Behavioural: layers that come from main memory, on a pretended GPU (`pretend`): the same logits as from the GPU, and no buffer is
overwritten before what reads it was computed, nor read before it has arrived."""

import contextlib

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.inference.models.streaming import StreamedLayers
from karui.kernels.gemm_weight import pack_weight
from karui.kernels.quantize import quantize
from tests.kernels.triton.pretend import marked
from tests.kernels.triton.test_dispatch import gpu  # noqa: F401 (a fixture)
from tests.kernels.triton.test_graphs import decoding
from tests.kernels.triton.test_runner import CONFIG, weights

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")


class Stream:
    """Work in order; `events` of all streams, as (stream, kind, what)."""

    log = []
    copies = staticmethod(lambda: None)

    def __init__(self, device=None, name="copying"):
        self.name = name

    def wait_event(self, event):
        Stream.log.append((self.name, "waits", event.token))

    def wait_stream(self, other):
        pass


class Event:
    def __init__(self):
        self.token = None

    def record(self, stream):
        self.token = object()
        Stream.log.append((stream.name, "records", self.token))


@contextlib.contextmanager
def within(stream):
    Stream.log.append((stream.name, "copies", Stream.copies()))
    yield


@pytest.fixture
def streams(gpu, monkeypatch):  # noqa: F811
    Stream.log, Stream.copies = [], staticmethod(lambda: None)
    for name, value in (("Stream", Stream), ("Event", Event), ("current_stream", lambda device=None: Stream(name="computing")),
                        ("stream", within)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: real(*size, **how))


def layer(seed):
    """A layer's weights as all that a product can be."""
    torch.manual_seed(seed)
    q = quantize(torch.randn(12, 64), QuantSpec.parse("nvfp4"))
    found = {"dense": torch.randn(5, 7), "packed": pack_weight(quantize(torch.randn(12, 64), QuantSpec.parse("w4g32a"))),
             "fp4": pack_weight(q), "codes": q}  # fmt: skip
    return {name: w.to("cuda") for name, w in found.items()}


def values(w):
    return w if isinstance(w, torch.Tensor) else w.dequantize() if hasattr(w, "dequantize") else torch.cat(
        [t.float().flatten() for t in (w.data, w.scale) if t is not None])  # fmt: skip


def test_each_visit_brings_its_layer(streams):
    made = [layer(seed) for seed in range(5)]
    streamed = StreamedLayers(torch.device("cuda"))
    for one in made:
        streamed.add(one)
    assert len(streamed.sizes) == 5 and all(size % 256 == 0 for size in streamed.sizes)
    streamed.open([1, 2, 4])
    for at in (1, 2, 4) * 3:
        got = streamed.visit()
        for name, w in made[at].items():
            assert torch.equal(values(got[name]), values(w)), (at, name)
        assert marked(got["dense"]) and marked(got["packed"].data) and marked(got["codes"].extra["global_scale"])
    assert torch.equal(streamed.weights(4)["dense"], made[4]["dense"].cpu())


def test_buffers_are_neither_overwritten_early_nor_read_early(streams):
    """What has surely happened before an entry of the log: all before it on its own stream, and what lay behind the events that this
    stream waited for."""
    streamed = StreamedLayers(torch.device("cuda"))
    for seed in range(3):
        streamed.add(layer(seed))
    streamed.open([0, 1, 2])
    buffers = {slot.data_ptr(): i for i, slot in enumerate(streamed._slots)}
    Stream.copies = lambda: (streamed._sent + 1) % 2
    for _ in range(7):
        Stream.log.append(("computing", "reads", buffers[streamed.visit()["dense"].data_ptr()]))
    before, latest, behind = {}, {"computing": set(), "copying": set()}, {}
    for i, (stream, kind, what) in enumerate(Stream.log):
        latest[stream] = latest[stream] | (behind[what] if kind == "waits" else set())
        before[i] = latest[stream]
        latest[stream] = latest[stream] | {i}
        if kind == "records":
            behind[what] = latest[stream]
    copies, reads = ([i for i, entry in enumerate(Stream.log) if entry[1] == kind] for kind in ("copies", "reads"))
    assert len(copies) == 8 and len(reads) == 7
    for i in copies:
        assert {j for j in reads if j < i and Stream.log[j][2] == Stream.log[i][2]} <= before[i], "written while it may be read"
    for i in reads:
        writes = {j for j in copies if j < i and Stream.log[j][2] == Stream.log[i][2]}
        assert writes and writes <= before[i], "read before it has arrived"


@pytest.mark.parametrize("spec", [None, "nvfp4", "w4g16"])
def test_the_runner(spec, streams):
    import dataclasses

    from karui.inference.models.gpu import TritonRunner

    config = dataclasses.replace(CONFIG, num_layers=4, sliding_window=())
    made = weights(config)
    if spec:
        made = {n: quantize(w, QuantSpec.parse(spec)) if w.ndim == 2 else w for n, w in made.items()}
    plain = TritonRunner(config, made, "cuda", torch.float16, graphs=False)
    with pytest.raises(KaruiError, match="too little"):
        TritonRunner(config, made, "cuda", torch.float16, weight_memory=1000)
    whole = plain.weight_bytes()
    streamed = TritonRunner(config, made, "cuda", torch.float16, weight_memory=int(whole * 0.85))
    assert streamed._away and len(streamed._away) < 4 and abs(streamed.weight_bytes() - whole) < 0.01 * whole
    for runner in (plain, streamed):
        runner.allocate(12, 4, "float16")
    for batch in (decoding(1, 2), decoding(5)):
        got, want = streamed.forward(batch), plain.forward(batch)
        assert torch.equal(got.logits, want.logits) and torch.equal(got.hidden, want.hidden)
    for i in range(4):
        name = f"model.layers.{i}.self_attn.k_proj"
        assert torch.equal(streamed.dense_weight(name), plain.dense_weight(name))
    new = {n: quantize(torch.randn(w.shape) / 8, w.spec) if hasattr(w, "spec") else torch.randn_like(w) / 8 for n, w in made.items()}
    for runner in (plain, streamed):
        runner.load_weights(new)
    assert torch.equal(streamed.forward(decoding(4)).logits, plain.forward(decoding(4)).logits)
