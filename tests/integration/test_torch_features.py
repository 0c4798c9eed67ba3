"""Sketched models are torch models: compile, copy, save, mixed precision, checkpointing, threads, devices."""

import copy
import io
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import comfetch as cf
from comfetch.layers import SketchedLayer
from tests.oracle import close, compiles, quiet_sketch, tensors
from tests.unit.test_footprint import MODELS, Convolutional, Encoder, Tagger, net

MODES = ("output", "input", "both")


def build(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    constructor, batch = MODELS[name]
    torch.manual_seed(0)
    model = cf.sketch(constructor, **{"compression": 4, "policy": "all", **options})
    return model, batch


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def train(model: nn.Module, x: Tensor, steps: int = 5) -> nn.Module:
    optimiser = torch.optim.Adam(cf.parameter_groups(model, lr=0.01))
    for _ in range(steps):
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()
    return model


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    assert list(a.state_dict()) == list(b.state_dict())
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


# ------------------------------------------------------------------------------------------------ compile


@compiles
@pytest.mark.parametrize(
    "name, mode",
    [("linear", m) for m in MODES] + [("convolutional", m) for m in ("output", "input")] + [("encoder", "output")],
)
def test_compiled_model_has_the_outputs_and_gradients_of_the_plain_one(name: str, mode: str) -> None:
    torch._dynamo.reset()
    model, x = build(name, mode=mode)
    wanted, wanted_grads = model(x), gradients(model, x)
    compiled: Any = torch.compile(model, backend="aot_eager")
    close(compiled(x), wanted, 1e-5, "output")
    for found, grad in zip(gradients(compiled, x), wanted_grads, strict=True):
        close(found, grad, 1e-5, "gradient")


@compiles
@pytest.mark.parametrize("options", [{"rows": 2}, {"rows": 3}, {"scale": "isometric", "hash": "random"}], ids=str)
def test_layers_compile_in_one_graph_with_every_option(options: dict) -> None:
    torch._dynamo.reset()
    model, x = build("linear", **options)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(compiled(x), model(x), 1e-5, "output")


# ------------------------------------------------------------------------------------------------ copy and save


@pytest.mark.parametrize("name", MODELS)
def test_deep_copy_is_equal_and_independent(name: str) -> None:
    model, x = build(name)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    before = copy.deepcopy(model.state_dict())
    train(twin, x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert cf.plan_of(twin) == cf.plan_of(model) and cf.plan_of(twin).kept == cf.plan_of(model).kept
    cf.unsketch(twin)


@pytest.mark.parametrize("name", MODELS)
def test_whole_model_survives_torch_save(name: str) -> None:
    model, x = build(name)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again.eval()(x), model.eval()(x))
    assert cf.plan_of(again) == cf.plan_of(model)
    close(cf.unsketch(again).eval()(x), model(x), 1e-5, "unsketched")


@pytest.mark.parametrize("name", MODELS)
def test_state_dict_moves_between_models_of_one_plan(name: str) -> None:
    model, x = build(name)
    train(model, x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other, _ = build(name)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.eval()(x), model.eval()(x))


@pytest.mark.parametrize("name", MODELS)
def test_state_dict_has_the_names_of_the_full_model_and_no_hash(name: str) -> None:
    model, _ = build(name)
    assert list(model.state_dict()) == list(MODELS[name][0]().state_dict())


def test_state_of_another_length_is_refused_by_torch() -> None:
    model, _ = build("linear")
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(build("linear", compression=8)[0].state_dict())


# ------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_autocast_with_three_rows_gives_gradients_in_the_precision_of_the_weights(name: str, mode: str) -> None:
    model, x = build(name, rows=3, mode=mode, policy="default" if name == "encoder" else "all")
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    close(found, model(x), 0.05, "output")
    found.float().square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32 and torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("name", MODELS)
def test_autocast_computes_in_bfloat16_as_with_the_full_model(name: str) -> None:
    model, x = build(name)
    full = cf.unsketch(model)
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = model(x), full(x)
    assert found.dtype == wanted.dtype
    close(found, exact, 0.05, "output")
    close(found, wanted, 0.05, "output")
    found.float().square().mean().backward()
    grads = gradients(copy.deepcopy(model), x)
    largest = max(float(grad.norm()) for grad in grads)  # a bias before batch norm has no gradient but for rounding
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert float((parameter.grad - grad).norm()) < 0.3 * (float(grad.norm()) + 1e-3 * largest)


@pytest.mark.parametrize("kind", ["linear", "conv2d", "transposed", "lstm", "attention"])
@pytest.mark.parametrize("mode", MODES)
def test_every_layer_gives_the_dtype_of_its_twin_under_autocast(kind: str, mode: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x)

    makers: dict[str, tuple[Any, tuple[int, ...]]] = {
        "linear": (lambda: nn.Linear(16, 16), (3, 16)), "conv2d": (lambda: nn.Conv2d(16, 16, 3), (2, 16, 5, 5)),
        "transposed": (lambda: nn.ConvTranspose2d(16, 16, 3), (2, 16, 5, 5)),
        "lstm": (lambda: nn.LSTM(16, 16), (4, 2, 16)), "attention": (Attention, (4, 2, 16)),
    }  # fmt: skip
    make, shape = makers[kind]
    model = cf.sketch(make, compression=2, mode=mode, policy="all")
    x = torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = tensors(model(x)), tensors(cf.unsketch(model)(x))
    assert [t.dtype for t in found] == [t.dtype for t in wanted]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", ["mean", "isometric"])
def test_model_can_be_moved_to_another_dtype_and_back(dtype: torch.dtype, scale: str) -> None:
    model, x = build("linear", scale=scale)
    wanted = model(x)
    moved = copy.deepcopy(model).to(dtype)
    found = moved(x.to(dtype))
    assert found.dtype == dtype
    close(found, wanted, 1e-5 if dtype == torch.float64 else 0.05, "output")
    close(cf.unsketch(moved)(x.to(dtype)), found, 1e-6 if dtype == torch.float64 else 0.05, "unsketched")
    close(moved.float()(x), wanted, 1e-5 if dtype == torch.float64 else 0.05, "output")


# ------------------------------------------------------------------------------------------------ and the rest


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("name", ["linear", "convolutional"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, rows: int, reentrant: bool) -> None:
    model, x = build(name, rows=rows)
    model.eval()  # batch statistics would be updated twice, as with full models
    x = x.clone().requires_grad_()
    wanted = gradients(model, x)
    model.zero_grad()
    checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, grad)


@pytest.mark.parametrize("name", MODELS)
def test_two_models_train_in_two_threads_as_one_after_the_other(name: str) -> None:
    def make(key: int) -> nn.Module:
        return build(name, key=key, scale="count", hash="random")[0]  # with multiplied steps

    x = MODELS[name][1]
    wanted = [train(make(key), x) for key in (1, 2)]
    models = [make(key) for key in (1, 2)]
    errors: list[BaseException] = []

    def run(model: nn.Module) -> None:
        try:
            train(model, x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(m,)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for found, expected in zip(models, wanted, strict=True):
        assert_same_state(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_model_on_the_meta_device_has_the_right_shapes(name: str) -> None:
    model, x = build(name)
    shape = model(x).shape
    found = copy.deepcopy(model).to("meta")(x.to("meta"))
    assert found.is_meta and found.shape == shape
    found.mean().backward()


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("scale", ["mean", "isometric", "count"])
def test_evaluation_in_inference_mode_does_not_spoil_later_training(size: int, scale: str) -> None:
    """Whatever is kept from one call to the next must be fit for both."""
    model = cf.sketch(
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * size**2, 8)),
        policy="all", compression=2, scale=scale, key=size,
    )  # fmt: skip
    x = torch.randn(2, 8, size, size)
    with torch.inference_mode():
        wanted = model(x)
        close(cf.unsketch(model)(x), wanted, 1e-5, "unsketched")
    assert torch.equal(model(x), wanted)
    assert all(torch.isfinite(g).all() for g in gradients(model, x))
    plan = cf.plan_of(model)["0.weight"]
    weight = torch.randn(plan.shape, requires_grad=True)
    plan.unsketch(plan.sketch(weight)).square().sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_channels_last_memory_format_gives_the_same_result(mode: str) -> None:
    model = cf.sketch(lambda: nn.Conv2d(16, 16, 3, padding=1), compression=2, mode=mode)
    for size in (2, 7):
        x = torch.randn(3, 16, size, size)
        last = x.contiguous(memory_format=torch.channels_last)
        a, b = x.clone().requires_grad_(), last.clone().requires_grad_()
        close(model(b), model(a), 1e-5, "output")
        for t in (a, b):
            model(t).square().sum().backward()
        close(b.grad, a.grad, 1e-5, "gradient")


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives_exist(mode: str, rows: int) -> None:
    model = quiet_sketch(nn.Linear(6, 8), compression=2, mode=mode, rows=rows).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: model(t).tanh(), (x,))


def test_models_print_what_was_sketched() -> None:
    model, _ = build("convolutional")
    assert "weight: (64, 32, 3, 3) -> (16, 32, 3, 3) output, 4 blocks, 1 rows" in repr(model)


def test_optimiser_made_before_the_swap_holds_the_old_parameters() -> None:
    """Documented: sketch() copies, so such an optimiser trains the model that was given."""
    model = net()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    sketched = quiet_sketch(model, compression=4)
    held = {id(p) for g in before.param_groups for p in g["params"]}
    assert not held & {id(p) for p in sketched.parameters()}


@pytest.mark.parametrize("constructor", [net, Convolutional, Encoder, Tagger])
def test_no_sketched_layer_is_taken_for_torchs(constructor: Any) -> None:
    model = cf.sketch(constructor, compression=4, policy="all")
    layers = [m for m in model.modules() if isinstance(m, SketchedLayer)]
    assert layers
    assert not any(isinstance(m, (nn.Linear, nn.Conv2d, nn.LSTM, nn.MultiheadAttention)) for m in layers)
