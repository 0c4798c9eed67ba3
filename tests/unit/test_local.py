"""Local training: every option against a few lines of plain torch."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfetch.methods import Local
from comfetch.methods.local import OPTIMISERS, one_gradient, train_locally


class Batches:
    """Twelve examples of a regression, in an order that follows the generator."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(12, 5, generator=draw), torch.randn(12, 2, generator=draw)

    def __len__(self) -> int:
        return 12

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(12, generator=generator).split(size):
            yield self.x[rows], self.y[rows]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 2)


def by_hand(local: Local, seed: int) -> nn.Module:
    model, data = build(), Batches()
    received = [p.detach().clone() for p in model.parameters()]
    optimiser = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[local.optimiser](model.parameters(), lr=local.lr)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(local.epochs):
        for x, y in data.batches(local.batch_size, generator):
            loss = F.mse_loss(model(x), y)
            for p, old in zip(model.parameters(), received, strict=True):
                loss = loss + local.prox / 2 * ((p - old) ** 2).sum()
            optimiser.zero_grad()
            loss.backward()
            if local.clip is not None:
                total = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
                for p in model.parameters():
                    p.grad *= min(1.0, local.clip / (total + 1e-6))
            optimiser.step()
    return model


@pytest.mark.parametrize(
    "local",
    [
        Local("sgd", lr=0.1, batch_size=4), Local("adam", lr=0.1, batch_size=5, epochs=3),
        Local("sgd", lr=0.1, batch_size=4, prox=5.0, epochs=2), Local("sgd", lr=0.5, batch_size=4, clip=0.1),
    ],
    ids=["sgd", "adam, three epochs", "prox", "clip"],
)  # fmt: skip
def test_training_equals_plain_torch(local):
    model = build()
    trained = train_locally(model, Batches(), local, {}, seed=7)
    wanted = by_hand(local, seed=7).state_dict()
    for name, tensor in trained.state.items():
        torch.testing.assert_close(tensor, wanted[name])
    assert trained.steps == local.epochs * -(-12 // local.batch_size)


def test_prox_and_clip_change_the_result():
    plain, pulled = (
        by_hand(Local("sgd", lr=0.1, batch_size=4), 7),
        by_hand(Local("sgd", lr=0.1, batch_size=4, prox=5.0), 7),
    )
    assert not torch.allclose(plain.weight, pulled.weight)


def test_a_number_of_steps_goes_over_the_data_as_often_as_needed():
    assert train_locally(build(), Batches(), Local(steps=7, batch_size=5), {}, seed=0).steps == 7


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_kept_optimiser_goes_on_where_it_was(name):
    kept, whole = {}, build()
    local = Local(name, lr=0.1, batch_size=12, keep_optimiser=True)
    model = build()
    for _ in range(2):
        train_locally(model, Batches(), local, kept, seed=1)
    optimiser = OPTIMISERS[name](whole.parameters(), lr=0.1)
    for _ in range(2):
        data = Batches()
        optimiser.zero_grad()
        data.loss(whole(data.x), data.y).backward()
        optimiser.step()
    torch.testing.assert_close(model.weight, whole.weight)


@pytest.mark.parametrize(
    ("local", "fused"),
    [
        (Local("adam"), True), (Local("adamw", settings={"weight_decay": 0.1}), True), (Local("sgd"), None),
        (Local("adam", settings={"foreach": True}), None), (Local("adam", settings={"fused": False}), False),
    ],
)  # fmt: skip
def test_adam_works_in_one_pass_unless_told_otherwise(local, fused):
    assert local.make_optimiser(build()).defaults["fused"] is fused
    assert not local.make_optimiser(build().to("meta")).defaults["fused"]


def test_a_fresh_optimiser_starts_anew():
    kept, fresh = build(), build()
    memory = {}
    for _ in range(2):
        train_locally(kept, Batches(), Local("adam", lr=0.1, batch_size=12, keep_optimiser=True), memory, seed=1)
        train_locally(fresh, Batches(), Local("adam", lr=0.1, batch_size=12), {}, seed=1)
    assert not torch.allclose(fresh.weight, kept.weight)


def test_one_gradient_is_that_of_all_examples_whatever_the_batches():
    data, model = Batches(), build()
    trained = one_gradient(model, data, Local(batch_size=5), seed=0)
    loss = data.loss(model(data.x), data.y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(trained.state["weight"], grads[0])
    torch.testing.assert_close(trained.state["bias"], grads[1])
    assert trained.loss == pytest.approx(loss.item())
    assert all(p.grad is None for p in model.parameters())
