"""Imports go one way, and the core needs three libraries only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import comfetch

ROOT = Path(comfetch.__file__).parent
ORDER = [
    "errors", "hashing", "medians", "sketching", "plan", "settings", "layers", "blueprint", "policy", "convert",
    "footprint", "groups", "files", "api",
]  # fmt: skip
"""The core: each may import those before it only. `errors → hashing → … → api`; blueprint needs no layers."""
FEDERATED = ["transforms", "capacity", "widths", "methods", "wire", "privacy", "driver"]
"""What the public face offers beyond the core. It stands on the core; the core knows nothing of it."""
LIBRARIES = {"torch", "numpy", "safetensors"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(name: str, at_once: bool = False) -> set[str]:
    """Return the full names of all modules that a module imports: wherever in its text, or at once, on top."""
    found = set()
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in FILES else str(node.module))
    return found


def family(name: str) -> str:
    """comfetch.layers.conv -> layers."""
    return name.split(".")[1] if "." in name else name


CORE = [name for name in FILES if family(name) in ORDER]
CLIENT = [name for name in FILES if family(name) in ORDER + FEDERATED]


def test_every_file_of_the_core_is_found() -> None:
    assert {family(name) for name in CORE} == set(ORDER)


@pytest.mark.parametrize("name", CORE)
def test_core_imports_only_what_stands_before_it(name: str) -> None:
    allowed = ORDER[: ORDER.index(family(name)) + 1]
    own = {family(i) for i in imports(name) if i.split(".")[0] == "comfetch"}
    assert own <= set(allowed), f"{name} imports {sorted(own - set(allowed))}"
    if family(name) == "blueprint":
        assert own <= {"errors", "blueprint"}


@pytest.mark.parametrize("name", CLIENT)
def test_what_a_small_client_installs_needs_three_libraries_only(name: str) -> None:
    foreign = {i.split(".")[0] for i in imports(name)} - {"comfetch"} - set(sys.stdlib_module_names)
    assert foreign <= LIBRARIES, f"{name} imports {sorted(foreign - LIBRARIES)}"


def test_public_face_imports_what_a_small_client_has() -> None:
    assert {family(i) for i in imports("comfetch", at_once=True)} <= {*ORDER, *FEDERATED, "comfetch", "typing"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: {i for i in imports(name, at_once=True) if i in FILES and i != name} for name in FILES}
    while graph:
        leaves = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert leaves, f"a circle among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in leaves}


def test_importing_comfetch_loads_no_extra() -> None:
    code = "import sys, comfetch; print(*{m.split('.')[0] for m in sys.modules}, *sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert not loaded & {"datasets", "flwr", "flwr_datasets", "matplotlib", "PIL", "ray", "rich", "sklearn", "typer"}
    own = {family(name) for name in loaded if name.startswith("comfetch.")}
    assert own <= set(ORDER + FEDERATED)
