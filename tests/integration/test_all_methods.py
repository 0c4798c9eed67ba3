"""What every method must do: count its bytes truly, resume, refuse what is no answer, and learn."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from comfetch.data import load_task
from comfetch.driver import Channel, Round, train_client, train_seed
from comfetch.experiment import Experiment
from comfetch.federation import make_federation
from comfetch.methods import METHODS, Message
from comfetch.simulation import simulate


def experiment(name: str, **options) -> Experiment:
    return Experiment.of({"task": "digits", "method": name, "clients": 3, "limit": 120, "batch_size": 16, **options})


def first_exchange(name: str):
    """Play the first round up to the uploads."""
    made = experiment(name)
    task, build = made.load()
    federation = make_federation(made.make_method(), task, build, made.clients)
    server = federation.start()
    play = Round(federation.method, server, Channel(), federation.clients)
    answers = []
    for client in federation.clients:
        audience, packed, received = play.post(client)
        model = federation.model(client, audience, received)
        memory = federation.memories.setdefault(client.id, {})
        seed = train_seed(0, 0, client)
        _, answer = train_client(
            federation.method, Channel(), model, federation.data[client.id], received, memory, seed
        )
        answers.append(Message({n: t.clone() for n, t in answer.state.items()}, answer.text))
        assert packed.nbytes == len(safetensors.torch.save(packed.state, packed.text or None))
        assert answer.nbytes == len(safetensors.torch.save(answers[-1].state, answer.text or None))
    return federation, play, answers


@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_those_of_the_files_and_the_upload_is_as_expected(name: str) -> None:
    federation, play, answers = first_exchange(name)
    for client, answer in zip(federation.clients, answers, strict=True):
        received = play.sent[federation.method.audience(play.server, client)][1]
        expected = federation.method.expected(received)
        assert {n: (t.shape, t.dtype) for n, t in answer.state.items()} == {
            n: (t.shape, t.dtype) for n, t in expected.items()
        }
        play.take(client, answer, 1.0)
    assert not play.refused


def spoilt(message: Message):
    """Give an upload spoilt in many ways."""
    for name, tensor in message.state.items():
        others = {n: t for n, t in message.state.items() if n != name}
        yield f"{name} missing", Message(others, message.text)
        yield f"{name} longer", Message({**others, name: torch.cat([tensor.reshape(-1)] * 2)}, message.text)
        yield f"{name} of another type", Message({**others, name: tensor.to(torch.complex64)}, message.text)
        if tensor.is_floating_point() and tensor.numel():
            yield f"{name} NaN", Message({**others, name: torch.full_like(tensor, torch.nan)}, message.text)
    yield "an unknown name", Message({**message.state, "evil": torch.zeros(1)}, message.text)
    yield "another round", Message(message.state, {**message.text, "round": "7"})


@pytest.mark.parametrize("name", METHODS)
def test_what_is_no_answer_is_refused_and_the_round_goes_on(name: str) -> None:
    federation, play, answers = first_exchange(name)
    tried = list(spoilt(answers[0]))
    for number, (attack, message) in enumerate(tried, 1):
        play.take(federation.clients[0], message, 1.0)
        assert len(play.refused) == number, attack
        assert play.refused[-1].startswith("client 0: ")
    for client, answer in zip(federation.clients[1:], answers[1:], strict=True):
        play.take(client, answer, 1.0)
    assert len(play.refused) == len(tried)


@pytest.mark.parametrize("name", METHODS)
def test_codes_that_mean_nothing_never_break_the_server(name: str) -> None:
    """Integers of any value: an index out of range or a wrong level is refused, or does no harm."""
    federation, play, answers = first_exchange(name)
    state = dict(answers[0].state)
    for tensor_name, tensor in answers[0].state.items():
        if tensor.dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
            limits = torch.iinfo(tensor.dtype)
            generator = torch.Generator().manual_seed(0)
            state[tensor_name] = torch.randint(
                limits.min // 2, limits.max // 2, tensor.shape, generator=generator, dtype=torch.int64
            ).to(tensor.dtype)
    play.take(federation.clients[0], Message(state, answers[0].text), 1.0)
    for client, answer in zip(federation.clients[1:], answers[1:], strict=True):
        play.take(client, answer, 1.0)
    request = play.ask()
    for client in play.asked:
        play.take(client, federation.method.respond(request, federation.memories[client.id]), None)
    server, record = play.close()
    assert record["clients"] >= 2
    assert all(bool(torch.isfinite(t).all()) for t in server.weights.values() if t.is_floating_point())


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_was_cut_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    def run(out: str, rounds: int, resume: bool = False):
        made = experiment(name, rounds=rounds, fraction=0.67)
        return made.run(tmp_path / out, resume=resume)

    whole = run("whole", 3)
    run("cut", 1)
    run("cut", 2, resume=True)
    again = run("cut", 3, resume=True)
    assert all(torch.equal(again.server.weights[n], t) for n, t in whole.server.weights.items())
    clean = [{k: v for k, v in r.items() if k != "seconds"} for r in whole.records]
    assert clean == [{k: v for k, v in r.items() if k != "seconds"} for r in again.records]


@pytest.mark.parametrize("name", METHODS)
def test_digits_are_learnt_within_ten_rounds_at_the_default_settings(name: str) -> None:
    history = simulate(METHODS[name](), load_task("digits"), clients=5, rounds=10)
    assert max(record["accuracy"] for record in history.records) > 0.5
