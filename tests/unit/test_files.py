"""Files of sketched models: they reopen anywhere, and refuse, saying how, what does not fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import comfetch as cf
from comfetch.errors import FileError, ModelError
from comfetch.files import PLAN
from tests.oracle import quiet_sketch
from tests.unit.test_policy import Language


def net(width: int = 128, classes: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("mode", ["output", "input", "both"])
@pytest.mark.parametrize("rows", [1, 3])
def test_model_reopens_from_its_file_and_constructor(path: Path, mode: str, rows: int) -> None:
    model = cf.sketch(net, compression=4, key=2**64 - 1, mode=mode, rows=rows, hash="random", scale="isometric")
    model(torch.randn(8, 16))  # running statistics
    cf.save(model, path)
    again = cf.load(path, net)
    assert cf.plan_of(again) == cf.plan_of(model) and cf.plan_of(again).kept == cf.plan_of(model).kept
    x = torch.randn(5, 16)
    assert torch.equal(again.eval()(x), model.eval()(x))
    assert list(again.state_dict()) == list(model.state_dict())


def test_model_reopens_in_another_process(path: Path) -> None:
    model = cf.sketch(net, compression=4, key=7).eval()
    cf.save(model, path)
    x = torch.linspace(-1, 1, 16)[None]
    code = (
        "import torch, comfetch as cf; from torch import nn;"
        "net = lambda: nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.Linear(128, 128), nn.ReLU(),"
        " nn.Linear(128, 4));"
        f"print(cf.load({str(path)!r}, net).eval()(torch.linspace(-1, 1, 16)[None]).tolist())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert torch.allclose(torch.tensor(json.loads(run.stdout)), model(x), atol=1e-6)


def test_every_dtype_and_integer_counters_survive(path: Path) -> None:
    def build() -> nn.Module:
        return net().to(torch.bfloat16)

    model = cf.sketch(build, compression=4)
    model[1].num_batches_tracked += 41
    cf.save(model, path)
    again = cf.load(path, build)
    assert again[1].num_batches_tracked == 41 and again[1].num_batches_tracked.dtype == torch.int64
    assert again[2].weight.dtype == torch.bfloat16


def test_tied_weights_are_saved_and_stay_tied(path: Path) -> None:
    model = cf.sketch(Language, compression=4)
    cf.save(model, path)
    again = cf.load(path, Language)
    assert again.embedding.weight is again.head.weight
    ids = torch.randint(1000, (2, 3))
    assert torch.equal(again(ids), model(ids))


def test_file_holds_the_small_weights_and_the_plan_only(path: Path) -> None:
    model = cf.sketch(net, compression=4)
    cf.save(model, path)
    tensors = load_file(path)
    assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in model.state_dict().items()}
    with safe_open(path, framework="pt") as file:
        assert cf.Plan.from_json(file.metadata()[PLAN]) == cf.plan_of(model)
    assert path.stat().st_size < sum(v.nbytes for v in tensors.values()) + 4000


def test_saving_twice_replaces_the_file_and_leaves_nothing_beside(path: Path) -> None:
    for key in (1, 2):
        cf.save(cf.sketch(net, compression=4, key=key), path)
    assert os.listdir(path.parent) == [path.name]
    assert cf.plan_of(cf.load(path, net)) == cf.plan_of(cf.sketch(net, compression=4, key=2))


def test_paths_may_be_text(path: Path) -> None:
    cf.save(cf.sketch(net, compression=4), str(path))
    cf.load(str(path), net)


def test_full_model_is_not_saved_here_and_the_remedy_works(path: Path) -> None:
    with pytest.raises(ModelError, match="no sketched layers. Save it as any torch model."):
        cf.save(net(), path)
    torch.save(net().state_dict(), path)
    assert path.exists()


def test_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="nowhere.*cannot be written"):
        cf.save(cf.sketch(net, compression=4), tmp_path / "nowhere" / "model")
    assert os.listdir(tmp_path) == []


def test_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(FileError, match="model.safetensors: cannot be read"):
        cf.load(path, net)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file_is_refused(path: Path, keep: int) -> None:
    cf.save(cf.sketch(net, compression=4), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FileError, match="cannot be read as a safetensors file"):
        cf.load(path, net)


def test_file_of_another_kind_is_refused(path: Path) -> None:
    path.write_text("epoch,accuracy\n1,0.5\n" * 100)
    with pytest.raises(FileError, match="cannot be read as a safetensors file"):
        cf.load(path, net)
    torch.save(net().state_dict(), path)
    with pytest.raises(FileError, match="cannot be read as a safetensors file"):
        cf.load(path, net)


def test_safetensors_file_without_a_plan_is_refused(path: Path) -> None:
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(FileError, match="has no plan. Was it written by comfetch.save?"):
        cf.load(path, net)


def change_plan(path: Path, plan: str) -> None:
    save_file(load_file(path), path, {PLAN: plan})


def test_file_with_a_broken_plan_is_refused(path: Path) -> None:
    cf.save(cf.sketch(net, compression=4), path)
    for broken in ("", "{}", '{"version": 9}', '{"version": 1, "weights": {"2.weight": {"geometry": 3}}, "kept": {}}'):
        change_plan(path, broken)
        with pytest.raises(FileError, match="Not a plan|version 9"):
            cf.load(path, net)


def test_wrong_constructor_is_refused_with_what_differs(path: Path) -> None:
    cf.save(cf.sketch(net, compression=4), path)
    with pytest.raises(FileError, match="does not fit this constructor.*2.weight.*256, 256.*128, 128"):
        cf.load(path, lambda: net(256))
    with pytest.raises(FileError, match="4.bias has shape \\(4,\\), not \\(7,\\). 4.weight has shape"):
        cf.load(path, lambda: net(classes=7))
    with pytest.raises(FileError, match="does not have: 2.weight"):
        cf.load(path, lambda: nn.Sequential(nn.Linear(16, 128)))
    with pytest.raises(FileError, match="4.bias is missing|4.bias is not in the model"):
        cf.load(path, lambda: net()[:4])
    with pytest.raises(FileError, match="5.bias is missing. 5.weight is missing."):
        cf.load(path, lambda: nn.Sequential(*net(), nn.Linear(4, 4)))
    with pytest.raises(FileError, match="0.bias has dtype torch.float32, not torch.float64"):
        cf.load(path, lambda: net().double())


def test_weights_of_another_plan_are_refused(path: Path) -> None:
    cf.save(cf.sketch(net, compression=4), path)
    change_plan(path, cf.plan_of(cf.sketch(net, compression=8)).to_json())
    with pytest.raises(FileError, match="2.weight has shape \\(32, 128\\), not \\(16, 128\\)"):
        cf.load(path, net)


def test_loaded_model_trains_on_as_the_saved_one_would(path: Path) -> None:
    model = quiet_sketch(net(), compression=4)
    cf.save(model, path)
    again = cf.load(path, net)
    x, y = torch.randn(16, 16), torch.randint(4, (16,))
    for m in (model, again):
        optimiser = torch.optim.Adam(m.parameters(), lr=0.01)
        for _ in range(3):
            optimiser.zero_grad()
            nn.functional.cross_entropy(m(x), y).backward()
            optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
