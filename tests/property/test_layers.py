"""The oracle: every sketched layer equals the full layer with Ŵ = E S; its small gradient is Eᵀ times the full one."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from comfetch.hashing import KINDS
from comfetch.layers import REGISTRY
from comfetch.plan import MODES
from comfetch.sketching import SCALES
from tests.oracle import Call, check_oracle, quiet_sketch, randomise

Case = tuple[nn.Module, Call, list[Tensor]]
Draw = Callable[[Any], Any]
CASES: dict[type[nn.Module], Callable[..., Any]] = {}
"""Layer type -> strategy of (full layer, how to call it, the inputs that have gradients), for a dtype."""
LINEAR_IN_WEIGHT = {
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.Embedding,
}  # fmt: skip
"""Layers where the median of k rows is one of outputs of whole layers; the others have theirs inside."""


def oracle_case(*types: type[nn.Module]) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for t in types:
            CASES[t] = st.composite(lambda draw, dtype, t=t: function(draw, t, dtype))
        return function

    return register


def variable(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


@oracle_case(nn.Linear)
def linear(draw: Draw, kind: Any, dtype: torch.dtype) -> Case:
    layer = nn.Linear(draw(st.integers(1, 12)), draw(st.integers(1, 12)), bias=draw(st.booleans()), dtype=dtype)
    shape = draw(st.sampled_from([(), (0,), (1,), (3,), (2, 3), (0, 2), (2, 0), (2, 1, 3)]))
    x = variable((*shape, layer.in_features), dtype)
    if draw(st.booleans()) and x.ndim == 3:
        return layer, lambda m: m(x.transpose(0, 1)), [x]  # not contiguous
    return layer, lambda m: m(x), [x]


@oracle_case(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(draw: Draw, kind: Any, dtype: torch.dtype) -> Case:
    dims = int(kind.__name__[-2])

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups = draw(st.integers(1, 3))
    inputs = groups * draw(st.integers(1 if groups == 1 else 2, 5))
    outputs = groups * draw(st.integers(1, 5))
    kernel, dilation = each(1, 3), each(1, 2)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding: Any = draw(st.sampled_from(["same", "valid", "numbers", "numbers", "numbers"]))
    stride = (1,) * dims if padding == "same" else each(1, 2)
    padding = each(0, 2) if padding == "numbers" else padding
    layer = kind(inputs, outputs, kernel, stride, padding, dilation, groups, draw(st.booleans()), mode, dtype=dtype)
    pads = padding if isinstance(padding, tuple) else (0,) * dims
    spans = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, pads, strict=True)]
    space = tuple(span + draw(st.integers(0, 3)) for span in spans)  # down to maps that are mostly padding
    batch = draw(st.sampled_from([(), (0,), (1,), (2,)]))
    x = variable((*batch, inputs, *space), dtype)
    return layer, lambda m: m(x), [x]


@oracle_case(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def conv_transpose(draw: Draw, kind: Any, dtype: torch.dtype) -> Case:
    dims = int(kind.__name__[-2])

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups = draw(st.integers(1, 3))
    inputs, outputs = groups * draw(st.integers(1 if groups == 1 else 2, 5)), groups * draw(st.integers(1, 5))
    kernel, dilation, stride, padding = each(1, 3), each(1, 2), each(1, 3), each(0, 1)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    layer = kind(inputs, outputs, kernel, stride, padding, extra, groups, draw(st.booleans()), dilation, dtype=dtype)
    space = each(2, 4)
    batch = draw(st.sampled_from([(), (0,), (1,), (2,)]))
    x = variable((*batch, inputs, *space), dtype)
    if draw(st.booleans()):
        least = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, s, p, d, k in zip(space, stride, padding, dilation, kernel, strict=True)
        ]
        size = [n + draw(st.integers(0, s - 1)) for n, s in zip(least, stride, strict=True)]
        assume(all(n > 0 for n in size))
        return layer, lambda m: m(x, size), [x]
    return layer, lambda m: m(x), [x]


@oracle_case(nn.Embedding)
def embedding(draw: Draw, kind: Any, dtype: torch.dtype) -> Case:
    words, width = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    by_frequency, sparse = draw(st.sampled_from([(False, False), (True, False), (False, True)]))  # torch has no fourth
    layer = nn.Embedding(
        words, width, padding_idx=draw(st.none() | st.integers(0, words - 1)),
        scale_grad_by_freq=by_frequency, sparse=sparse, dtype=dtype,
    )  # fmt: skip
    shape = draw(st.sampled_from([(0,), (7,), (2, 3), (2, 0)] + [()] * (not sparse)))  # nor single sparse ids
    ids = torch.randint(words, shape)
    return layer, lambda m: m(ids), []


@oracle_case(nn.LSTM, nn.GRU, nn.RNN)
def recurrent(draw: Draw, kind: Any, dtype: torch.dtype) -> Case:
    size, hidden, layers = draw(st.integers(1, 6)), draw(st.integers(2, 6)), draw(st.integers(1, 2))
    options: dict[str, Any] = {"bias": draw(st.booleans()), "batch_first": draw(st.booleans())}
    options["bidirectional"] = draw(st.booleans())
    if kind is nn.LSTM:
        options["proj_size"] = draw(st.integers(0, hidden - 1))
    if kind is nn.RNN:
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    layer = kind(size, hidden, layers, dtype=dtype, **options)
    time, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    form = draw(st.sampled_from(["padded", "padded", "single", "packed"]))
    shape = (time, size) if form == "single" else (batch, time, size) if options["batch_first"] else (time, batch, size)
    x = variable(shape, dtype)
    inputs, state = [x], None
    if draw(st.booleans()):
        count = layers * (2 if options["bidirectional"] else 1)
        sizes = [options.get("proj_size") or hidden] + ([hidden] if kind is nn.LSTM else [])
        states = [variable((count, n) if form == "single" else (count, batch, n), dtype) for n in sizes]
        inputs += states
        state = tuple(states) if kind is nn.LSTM else states[0]
    if form == "packed":
        lengths = torch.tensor([draw(st.integers(1, time)) for _ in range(batch)])

        def packed(m: nn.Module) -> Any:
            sequence = pack_padded_sequence(x, lengths, batch_first=options["batch_first"], enforce_sorted=False)
            output, final = m(sequence, state)
            return output.data, final

        return layer, packed, inputs
    return layer, lambda m: m(x, state), inputs


@oracle_case(nn.MultiheadAttention)
def attention(draw: Draw, kind: Any, dtype: torch.dtype) -> Case:
    heads = draw(st.integers(1, 3))
    width = heads * draw(st.integers(1, 4))
    own = draw(st.booleans())
    layer = nn.MultiheadAttention(
        width, heads, bias=draw(st.booleans()), add_bias_kv=draw(st.booleans()), add_zero_attn=draw(st.booleans()),
        kdim=draw(st.integers(1, 6)) if own else None, vdim=draw(st.integers(1, 6)) if own else None,
        batch_first=draw(st.booleans()), dtype=dtype,
    )  # fmt: skip
    batch, targets, sources = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(2, 4))
    single = draw(st.booleans())

    def make(n: int, features: int) -> Tensor:
        if single:
            return variable((n, features), dtype)
        return variable((batch, n, features) if layer.batch_first else (n, batch, features), dtype)

    q = make(targets, width)
    same = not own and draw(st.booleans())
    k, v = (q, q) if same else (make(sources, layer.kdim), make(sources, layer.vdim))
    n = targets if same else sources
    options: dict[str, Any] = {"need_weights": draw(st.booleans()), "average_attn_weights": draw(st.booleans())}
    if draw(st.booleans()):
        mask = torch.zeros(n, dtype=torch.bool) if single else torch.zeros(batch, n, dtype=torch.bool)
        mask[..., 1:] = True
        options["key_padding_mask"] = mask
    if draw(st.booleans()):
        options["attn_mask"] = torch.ones(targets, n, dtype=torch.bool).triu(1)
    return layer, lambda m: m(q, k, v, **options), [q] if same else [q, k, v]


ONE_ROW = st.just(1)


def options_for(mode: str, rows: Any = ONE_ROW) -> Any:
    return st.fixed_dictionaries(
        {
            "mode": st.just(mode),
            "rows": rows,
            "blocks": st.just("auto") | st.integers(1, 6),
            "hash": st.sampled_from(KINDS),
            "scale": st.sampled_from(SCALES),
            "compression": st.sampled_from([1, 1.5, 2, 3, 4, 7]),
            "key": st.integers(0, 2**64 - 1),
        }
    )


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using padding='same' with even kernel")  # torch's own
        yield


def check(case: Case, options: dict[str, Any], tolerance: float = 1e-9) -> None:
    layer, call, inputs = case
    try:
        call(layer)
    except RuntimeError:
        assume(False)  # torch itself refuses this combination
    sketched = quiet_sketch(layer, **options)
    randomise(sketched)
    check_oracle(sketched, call, inputs, tolerance)


def by_name(t: type) -> str:
    return t.__name__


def test_every_registered_layer_has_an_oracle_case() -> None:
    assert {t.__name__ for t in REGISTRY} == {t.__name__ for t in CASES}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CASES, ids=by_name)
def test_sketched_layer_equals_the_full_layer_with_its_unsketched_weight(kind: Any, mode: str) -> None:
    @given(CASES[kind](torch.float64), options_for(mode))
    def run(case: Case, options: dict[str, Any]) -> None:
        check(case, options)

    run()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", sorted(LINEAR_IN_WEIGHT, key=by_name), ids=by_name)
def test_output_of_many_rows_is_the_median_of_the_outputs_of_each(kind: Any, mode: str) -> None:
    @given(CASES[kind](torch.float64), options_for(mode, st.integers(2, 5)))
    @settings(max_examples=25)
    def run(case: Case, options: dict[str, Any]) -> None:
        check(case, options)

    run()


def is_strided(layer: nn.Module) -> bool:
    """Tell convolutions that torch itself gets wrong in 16 bits, on CPUs with instructions for these.

    Strided ones of narrow maps (`nn.Conv3d(4, 8, 2, stride=2)` to a map of width 1, for one) return what had been in
    their memory before: NaN, if that had been there.
    """
    return max(getattr(layer, "stride", (1,))) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", CASES, ids=by_name)
def test_oracle_holds_in_every_dtype(kind: Any, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.15, torch.float16: 0.03}[dtype]

    @given(CASES[kind](dtype), st.sampled_from(MODES).flatmap(options_for))
    @settings(max_examples=12)
    def run(case: Case, options: dict[str, Any]) -> None:
        assume(dtype is torch.float32 or not is_strided(case[0]))
        check(case, options, tolerance)

    run()
