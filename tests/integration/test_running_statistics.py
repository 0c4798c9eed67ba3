"""Running statistics of sub-models whose channels change: taken anew from clients' data before a test."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from comfetch.data import Examples, Task
from comfetch.driver import Channel, settle
from comfetch.federation import make_federation
from comfetch.methods import Client, Local
from comfetch.methods.fedrolex import FederatedDropout, FedRolex, take_statistics
from comfetch.methods.heterofl import HeteroFL
from comfetch.privacy import Privacy
from tests.integration.regression import Regression


class Halves(Regression):
    """Two batches, of the first and the second half."""

    def batches(self, size, generator):
        yield from zip(self.x.chunk(2), self.y.chunk(2), strict=True)


def halves(seed: int, count: int = 8) -> Halves:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=draw, dtype=torch.float64) * 5 + 2
    return Halves(x, x[:, :1])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.9), nn.Linear(4, 1)).double()
    model[1].running_mean.fill_(77)
    return model


def test_statistics_become_the_mean_over_batches_of_all_clients():
    model, data = net(), [halves(0), halves(1)]
    weight, bias = (p.detach().numpy() for p in (model[0].weight, model[0].bias))
    seen = [x.numpy() @ weight.T + bias for one in data for x in one.x.chunk(2)]
    take_statistics(model, data)
    np.testing.assert_allclose(model[1].running_mean, np.mean([z.mean(0) for z in seen], axis=0))
    np.testing.assert_allclose(model[1].running_var, np.mean([z.var(0, ddof=1) for z in seen], axis=0))


def test_nothing_but_statistics_is_changed():
    model = net()
    before = copy.deepcopy(model.state_dict())
    take_statistics(model, [halves(0)])
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert model[1].momentum == 0.1 and not any(layer.training for layer in model.modules())


def test_batches_of_one_example_are_passed_over():
    model = net()
    take_statistics(model, [halves(0, count=2)])
    assert bool(model[1].running_mean.eq(0).all()) and bool(model(halves(1).x).isfinite().all())


def test_what_is_private_has_no_say_in_statistics():
    model, data = net(), [halves(0)]
    before = copy.deepcopy(model.state_dict())
    settle(FedRolex(4), Channel(privacy=Privacy("central", clip=1.0, noise=1.0)), model, data)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    settle(HeteroFL(4), Channel(), model, data)  # whose channels stay
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    settle(FedRolex(4), Channel(), model, data)
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


def blobs(count: int, seed: int) -> Examples:
    draw = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % 4
    return Examples(torch.randn(count, 8, generator=draw) * 3 + 9 * nn.functional.one_hot(targets, 8), targets)


def wide() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 4),
    )  # fmt: skip


@pytest.mark.parametrize("make", [FedRolex, FederatedDropout])
def test_the_full_model_of_changing_sub_models_is_a_good_one(make):
    task = Task("blobs", wide, blobs(240, 0), blobs(200, 1), (8,), 4)
    method = make(4, local=Local("adam", lr=0.01, batch_size=20))
    federation = make_federation(method, task, clients=3)
    server = federation.start()
    for _ in range(6):
        server, _ = federation.round(server)
    record = federation.evaluate(server)
    assert record["accuracy_full"] > 0.9
    _, full = federation.final_models(server)
    stale = wide()
    stale.load_state_dict(server.weights)
    assert federation.test(stale, task.test)[0] > federation.test(full, task.test)[0]
    client = federation.client_model(server, Client(0, 80))
    assert not torch.equal(client[1].running_mean, federation.settled(copy.deepcopy(client))[1].running_mean)
