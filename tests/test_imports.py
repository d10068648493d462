"""The direction of imports, as docs/architecture.md draws it, and what importing a module must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import quire

pytestmark = pytest.mark.core

PACKAGE = Path(quire.__file__).parent

# What a room may import of quire beside itself. A name stands for the module and everything below it.
ALLOWED: dict[str, set[str]] = {
    "": {"llm", "async_llm", "beam_search", "config", "core", "errors"},
    "errors": set(),
    "config": {"errors"},
    "core": {"errors"},
    "kernels": {"config", "errors"},
    "quant": {"kernels", "errors"},
    "layers": {"quant", "kernels", "models.config", "errors"},
    "models": {"layers", "quant", "kernels", "errors"},
    "store": {"config", "errors"},
    "weights": {"models", "layers", "quant", "kernels", "errors"},
    "speculative": {"core", "kernels", "errors"},
    "text": {"core", "weights.gguf", "weights.gguf_strings", "errors"},
    "capacity": {"core", "errors"},
    "trace": {"core", "errors"},
    "engine": {
        "",
        "capacity",
        "core",
        "models",
        "layers",
        "weights",
        "speculative",
        "kernels",
        "quant",
        "text.detokenizer",
        "text.grammar",
        "text.load",
        "text.tokenizer",
        "trace",
        "config",
        "errors",
    },
    "progress": set(),
    "event_loop": set(),
    "file_limit": set(),
    "beam_search": {"core", "errors"},
    "llm": {"engine.client", "text", "core", "store", "beam_search", "progress", "config", "errors"},
    "async_llm": {"llm", "engine.client", "engine.async_client", "text", "core", "store", "config", "errors"},
    "server": {
        "",
        "event_loop",
        "engine.fleet",
        "engine.live_changes",
        "engine.messages",
        "engine.supervisor",
        "capacity",
        "text",
        "core",
        "store",
        "trace",
        "weights.gguf",
        "config",
        "errors",
    },
    "top": {"errors"},
    "batch": {"", "server", "engine.fleet", "engine.messages", "event_loop", "text", "config", "errors"},
    "bench": {
        "event_loop",
        "file_limit",
        "llm",
        "async_llm",
        "engine.backend",
        "",
        "engine.batching",
        "engine.client",
        "engine.limits",
        "engine.machine",
        "engine.memory",
        "engine.observer",
        "engine.profiles",
        "engine.recorder",
        "trace",
        "engine.prompt_logits",
        "engine.sizing",
        "speculative.controller",
        "capacity",
        "weights.config",
        "core",
        "text",
        "store",
        "kernels.cuda_driver",
        "kernels.isa",
        "progress",
        "config",
        "errors",
    },
    "quantize": {
        "",
        "bench.compare",
        "engine.text_states",
        "models",
        "layers",
        "weights",
        "quant",
        "kernels",
        "text",
        "config",
        "errors",
    },
    "train": {
        "llm",
        "bench.speculation",
        "engine",
        "models",
        "layers.attention",
        "layers.mlp",
        "layers.rotary",
        "weights",
        "speculative",
        "kernels",
        "core",
        "progress",
        "config",
        "errors",
    },
    "distributed": {"engine", "core", "config", "errors"},
    "cli": {""},
    "__main__": {"cli"},
}

# What importing a module, or one of a room, must not load.
LIGHT: dict[str, tuple[str, ...]] = {
    "quire": ("torch", "numpy"),
    "quire.config": ("torch", "numpy"),
    "quire.core": ("torch", "numpy"),
    "quire.kernels.isa": ("torch", "numpy"),
    "quire.kernels.cpu.native": ("torch", "numpy"),
    "quire.trace": ("torch", "numpy", "pydantic", "fastapi"),
    "quire.store": ("torch", "numpy", "huggingface_hub"),
    "quire.weights.gguf": ("torch", "numpy"),
    "quire.weights.config": ("torch", "numpy"),
    "quire.text.input_processor": ("torch", "numpy", "tokenizers", "jinja2", "llguidance"),
    "quire.text": ("torch",),
    "quire.server": ("torch",),
    "quire.batch": ("torch",),
    "quire.top": ("torch", "numpy", "msgspec", "pydantic", "starlette"),
    "quire.bench.serve": ("torch", "numpy"),
    "quire.bench.report": ("torch", "numpy"),
    "quire.train.dialogues": ("torch",),
    "quire.train.report": ("torch",),
    "quire.cli.main": ("torch", "numpy", "tokenizers", "huggingface_hub", "dataclasses"),
}


def module_name(path: Path) -> str:
    """From quire/core/plan.py to "core.plan"; the package itself is the empty name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(tree: ast.Module, name: str, is_package: bool) -> set[str]:
    """Every module of quire that is imported anywhere in a tree; `from x import y` is x.y where that is a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, name, is_package)
            found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    inside = {target.removeprefix("quire").removeprefix(".") for target in found if target.split(".")[0] == "quire"}
    return {target for target in inside if target in MODULES and not is_only_a_prefix(target, inside)}


def absolute(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    """The module that an import statement names, its leading dots resolved."""
    if not node.level:
        return node.module or ""
    here = ["quire", *filter(None, name.split("."))]
    base = here[: len(here) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def is_only_a_prefix(target: str, inside: set[str]) -> bool:
    """`from quire.core import plan` names quire.core only on the way to quire.core.plan."""
    return any(other in MODULES and other != target and within(other, target) for other in inside)


def within(name: str, room: str) -> bool:
    return room in ("", name) or name.startswith(f"{room}.")


def room_of(name: str) -> str:
    return name.split(".")[0]


def forbidden(name: str, targets: set[str]) -> set[str]:
    room = room_of(name)
    allowed = ALLOWED[room] | {room} if room else ALLOWED[room]
    return {target for target in targets if not any(within(target, entry) for entry in allowed)}


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "quire")
def test_imports_keep_their_direction(name):
    path = MODULES[name]
    assert room_of(name) in ALLOWED, f"{name} is in a room that the table of allowed imports does not know"
    targets = imports_of(ast.parse(path.read_text()), name, path.name == "__init__.py")
    assert forbidden(name, targets) == set(), f"quire.{name} must not import these"


@pytest.mark.parametrize("name", [name for name in MODULES if within(name, "core")])
def test_core_imports_the_standard_library_only(name):
    nodes = list(ast.walk(ast.parse(MODULES[name].read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    roots = {target.split(".")[0] for target in plain | named}
    assert roots - {"quire"} <= sys.stdlib_module_names


class TestTheTestItself:
    """A wrong import must be seen however it is written."""

    @pytest.mark.parametrize(
        "source",
        [
            "import quire.weights.loader",
            "import quire.weights.loader as s",
            "from quire.weights import loader",
            "from quire.weights.loader import load_model",
            "def f():\n    from quire.weights import loader",
            "if TYPE_CHECKING:\n    from ..weights.loader import load_model",
            "from .. import weights",
        ],
    )
    def test_core_may_not_import_weights(self, source):
        targets = imports_of(ast.parse(source), "core.plan", is_package=False)
        assert {room_of(target) for target in forbidden("core.plan", targets)} == {"weights"}

    @pytest.mark.parametrize("source", ["from .plan import x", "from quire.core import plan", "import quire.errors"])
    def test_core_may_import_itself_and_errors(self, source):
        targets = imports_of(ast.parse(source), "core.request", is_package=False)
        assert targets
        assert forbidden("core.request", targets) == set()

    def test_only_the_named_part_of_a_room_is_open(self):
        assert forbidden("text.tokenizer", {"weights.gguf"}) == set()
        assert forbidden("text.tokenizer", {"weights.loader", "weights"}) == {"weights.loader", "weights"}

    def test_the_command_line_may_import_anything(self):
        assert forbidden("cli.main", {"engine.engine", "errors"}) == set()

    def test_the_table_has_no_cycle(self):
        """Rooms, taken whole; the pages that rooms below may read are leaves of their own."""
        leaves = {"models.config", "weights.gguf", "weights.gguf_strings"}
        above = {room: {room_of(entry) for entry in entries - leaves} for room, entries in ALLOWED.items() if room}
        del above["cli"]
        while above:
            free = {room for room, entries in above.items() if not entries & above.keys()}
            assert free, f"a cycle among {sorted(above)}"
            above = {room: entries for room, entries in above.items() if room not in free}


def light_modules(entry: str) -> list[str]:
    """The modules within an entry of LIGHT that there are; the package itself stands for itself alone."""
    names = [f"quire.{name}" if name else "quire" for name in MODULES]
    return [name for name in names if name == entry or (entry != "quire" and within(name, entry))]


@pytest.mark.parametrize("entry", [entry for entry in LIGHT if light_modules(entry)])
def test_light_modules_load_nothing_heavy(entry):
    script = """
import importlib, sys
modules, heavy = sys.argv[1].split(), sys.argv[2].split()
for module in modules:
    importlib.import_module(module)
    if loaded := [name for name in heavy if name in sys.modules]:
        sys.exit(f"importing {module} loads {loaded}")
"""
    command = [sys.executable, "-c", script, " ".join(light_modules(entry)), " ".join(LIGHT[entry])]
    child = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert child.returncode == 0, child.stderr
