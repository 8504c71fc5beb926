"""The layout: imports go down the floors, never up and never in a circle."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = [  # from the ground up; what stands on one floor may import what is below it
    {"_problem", "_files"},
    {"_constraints"},
    {"_engines"},
    {"_diagnostics"},
    {"_outer"},
    {"_realtime", "_attribution"},
    {"report", "optuna", "torch"},
    {"apps"},
    {"cli", "__main__"},
    {"experiments", "benchmarks"},
]
CORE_FLOORS = 5  # the number of the last that is core
# The numerical core; callbacks import Rich, Orbax and the like when they are used.
CORE = {"jax", "optax", "equinox", "jaxtyping", "lineax", "numpy"}


def modules():
    """Return each module's name and its file: of the package, the experiments and benchmarks."""
    found = {}
    for folder, package in (("src", "foretune"), (".", "experiments"), (".", "benchmarks")):
        for path in (ROOT / folder).glob(f"{package}/**/*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name, *, everywhere):
    """Return the modules that a module imports, also inside its functions if `everywhere`."""
    path = MODULES[name]
    tree = ast.parse(path.read_text())
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in MODULES else base


def floor(name):
    parts = name.split(".")
    top = [*parts, ""][1] if parts[0] == "foretune" else parts[0]
    return next((i for i, names in enumerate(FLOORS) if top in names), None)


def test_no_import_goes_up():
    for name in MODULES.keys() - {"foretune"}:  # which re-exports from all floors
        own = floor(name)
        assert own is not None, f"{name} stands on no floor"
        for other in imports(name, everywhere=True):
            if other == "foretune":
                assert own > CORE_FLOORS, f"{name} imports the whole package"
            elif other in MODULES:
                assert floor(other) <= own, f"{name} imports {other}"


def test_no_circle():
    graph = {name: {o for o in imports(name, everywhere=True) if o in MODULES} for name in MODULES}
    graph = {name: others - {"foretune"} for name, others in graph.items() if name != "foretune"}
    done, under_way = set(), []

    def visit(name):
        assert name not in under_way, " -> ".join([*under_way[under_way.index(name) :], name])
        if name in done or name not in graph:
            return
        under_way.append(name)
        for other in sorted(graph[name]):
            visit(other)
        under_way.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)


def test_the_core_imports_only_its_own_packages():
    for name in MODULES.keys() - {"foretune"}:
        for other in imports(name, everywhere=False) if floor(name) <= CORE_FLOORS else ():
            top = other.split(".")[0]
            assert top in CORE | {"foretune"} | sys.stdlib_module_names, f"{name} imports {other}"
