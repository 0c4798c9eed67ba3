"""Running statistics: taken anew from clients' data before a test, for sub-models whose channels change or if asked."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from comfetch.batchnorm import take_statistics
from comfetch.data import Examples, Task
from comfetch.driver import Channel, check_channel, settle
from comfetch.errors import OptionError
from comfetch.experiment import Experiment
from comfetch.federation import make_federation
from comfetch.methods import Averaging, Client, Comfetch, FedAvg, Local
from comfetch.methods.fedrolex import FederatedDropout, FedRolex
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


def test_who_runs_it_decides_whether_statistics_are_averaged_or_taken_anew():
    model, data = net(), [halves(0)]
    before = copy.deepcopy(model.state_dict())
    settle(FedRolex(4, averaging=Averaging(statistics="averaged")), Channel(), model, data)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    settle(FedAvg(averaging=Averaging(statistics="anew")), Channel(), model, data)
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


def test_statistics_taken_anew_are_refused_where_examples_are_private():
    options = {"statistics": "anew", "privacy": "central", "weighting": "uniform"}
    asked = Experiment.of(options)
    with pytest.raises(OptionError, match="^privacy='central': statistics='anew' would take them.*Leave it out"):
        check_channel(asked.make_method(), asked.channel())
    del options["statistics"]
    check_channel(Experiment.of(options).make_method(), asked.channel())


def test_unknown_statistics_are_refused():
    with pytest.raises(OptionError, match="statistics='best' is not known. Choose one of: averaged, anew"):
        Averaging(statistics="best")


def blobs(count: int, seed: int) -> Examples:
    draw = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % 4
    return Examples(torch.randn(count, 8, generator=draw) * 3 + 9 * nn.functional.one_hot(targets, 8), targets)


def wide() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 4),
    )  # fmt: skip


def test_statistics_taken_anew_change_what_is_tested_and_no_training():
    task, found = Task("blobs", wide, blobs(240, 0), blobs(200, 1), (8,), 4), {}
    for statistics in ("averaged", "anew"):
        local, averaging = Local("adam", lr=0.03, batch_size=20), Averaging(statistics=statistics)
        federation = make_federation(
            Comfetch(4, local=local, averaging=averaging, sketch={"policy": "all"}), task, clients=3
        )
        server, _ = federation.round(federation.start())
        found[statistics] = server.weights, federation.evaluate(server), federation.final_models(server)
    (weights, averaged, stale), (same, anew, models) = found["averaged"], found["anew"]
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    assert anew["test_loss"] != averaged["test_loss"]
    for old, model in zip(stale, models, strict=True):
        take_statistics(old, federation.data)
        assert torch.equal(old[1].running_mean, model[1].running_mean)
        assert federation.test(model, task.test) == pytest.approx((anew["test_loss"], anew["accuracy"]))


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
