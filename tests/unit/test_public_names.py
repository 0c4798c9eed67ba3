"""The names that comfetch exports, and how they are called: a change here is a change of the contract."""

import inspect

import pytest

import comfetch as cf
from comfetch import errors

NAMES = {
    "ComfetchError", "Footprint", "Plan", "adaptive", "chain", "error_feedback", "footprint", "load", "methods",
    "momentum", "parameter_groups", "plan_of", "register_layer", "save", "scale", "simulate", "sketch", "top_k",
    "unsketch",
}  # fmt: skip


def test_exported_names_are_these_and_no_others() -> None:
    assert set(cf.__all__) == NAMES
    assert list(cf.__all__) == sorted(cf.__all__)
    public = {name for name, value in vars(cf).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public - {"Any"} == NAMES - {"methods", "simulate"}
    assert all(hasattr(cf, name) for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        cf.simulated  # noqa: B018


def test_sketch_is_called_as_the_contract_says() -> None:
    parameters = inspect.signature(cf.sketch).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert next(iter(parameters)) == "model_or_constructor"
    assert defaults == {
        "compression": None, "length": None, "budget": None, "key": 0, "mode": "output", "rows": 1, "blocks": "auto",
        "hash": "balanced", "scale": "mean", "policy": "default", "spread": 0.0, "only": None, "skip": None,
        "batch": None, "optimiser": "adam",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("unsketch", ["sketched"]), ("footprint", ["model", "batch"]), ("save", ["sketched", "path"]),
        ("load", ["path", "constructor"]), ("register_layer", ["torch_type"]), ("parameter_groups", ["model", "lr"]),
    ],
)  # fmt: skip
def test_other_functions_are_called_as_the_contract_says(name: str, parameters: list[str]) -> None:
    found = inspect.signature(getattr(cf, name)).parameters.values()
    assert [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD] == parameters


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_exported_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(cf, name))


def test_every_error_is_a_comfetch_error_and_stands_in_the_tree() -> None:
    classes = {n: c for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, Exception)}
    assert len(classes) > 3
    for name, error in classes.items():
        assert issubclass(error, cf.ComfetchError)
        assert name in (errors.__doc__ or "")


def test_one_problem_is_said_as_it_is_and_many_are_listed() -> None:
    assert str(errors.ModelError.of(["a"])) == "a"
    assert str(errors.ModelError.of(["a", "b"])) == "2 problems:\n  - a\n  - b"


def test_version_is_that_of_the_package() -> None:
    assert cf.__version__.count(".") == 2
