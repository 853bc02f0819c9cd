"""The rules of the house, held by reading the source rather than by intent.

Direction of imports, what stays free of torch, sizes, public names. See docs/architecture.md.
"""

import ast
import re
from collections.abc import Iterable

from support import house
from support import source_tree as tree

from tools import layers, rules

LAYERS = tuple(tuple(map(layers.module_name, names)) for names, _ in layers.LAYERS)
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
# The same inside `engine.sched`, the lowest first.
SCHED = (
    ("table",),
    ("request",),
    ("columns", "roster"),
    ("step_state", "predict"),
    ("policy", "interface", "view"),
    ("resource",),
    ("plugins", "micro_batches"),
    ("step",),
    ("scheduler",),
    ("policies",),
    ("plugins.find",),  # a name to a class: the one file of its folder that knows schedulers
)

# The one module of the engine that imports the policy lab: what has moved there, for one release.
ALIAS = "engine.verify.testing"
FORMER_NAMES = "engine.moved"  # finds by name what else has moved
# Names that hold others together and have nothing of their own.
HOLDERS = ("engine", "engine.verify", "policylab")

# Modules that may import inside functions, and why.
LAZY_IMPORTS = {
    "engine.cluster": "Ray, which is optional, is imported only for a deployment",
    "engine.cluster.nodes.node": "Ray sends it to nodes, which may lack the engine",
    "engine.frontend.session": "Ray and Pillow are imported only for clusters and pictures",
    "engine.frontend.text_worker_main": "transformers is imported only by processes that decode",
    "engine.core.ranks": "Ray is imported only by ranks on the nodes of a cluster",
    "engine.core.build": "the one place that names concrete classes",
    "kernels.bodies": "Triton is imported only where it computes",
    "engine.structured.guidance": "llguidance is imported only for a grammar",
    "engine.structured.sources": "the same",
    "engine.structured.weakened.library": "the same",
    "engine.structured.checked.expressions": "regex is imported only for a schema with a pattern",
    "engine.structured.checked.formats": "idna is imported only for the names of hosts in Unicode",
    "engine.structured.xgrammar.compiler": "xgrammar, which is optional, brings torch and pydantic",
    "engine.hub.fetch": "huggingface_hub is imported only for a model given by name",
    "engine.cli.entry": "what an interrupt does is settled before anything heavy is imported",
    "engine.cli.prepare": "kernels bring torch, which no other command needs at its start",
    "engine.cli.serve": "uvicorn and Starlette, which are optional, are imported only to serve",
    "engine.server.run": "OpenTelemetry, which is optional, is imported only to trace",
    "engine.frontend.adapters": "torch is imported only for an adapter from memory",
    "engine.kv_transfer.halves": "what copies blocks is imported only where there are stores",
    "engine.kv_transfer.peers.mooncake": "Mooncake is imported only where it is chosen",
    "engine.lora.halves": "what computes adapters is imported only for an engine that takes them",
    "engine.parallel.meeting": "torch.distributed is imported only by ranks on GPUs",
    "engine.models.load": "transformers is imported only for what has no native family",
    "engine.models.opening": "the gguf package is imported only for GGUF files",
    "engine.rpc.balance": "the fast hash imports Numba, and only cores with that option need it",
    "engine.rpc.pixel_route": "torch is imported only where pixels are copied to a GPU",
    "engine.rpc.gpus": "torch is asked for GPUs only where several cores start",
    "policylab.sim.kv_groups": "transformers is imported only to read a model's config.json",
    "policylab.sim.report.images": "what draws images is optional, and imported only to draw",
    "policylab.verify.pytest_plugin": "pytest loads it in every project where it is installed",
}

HEAVY = ("torch", "zmq", "transformers")
# Packages and modules that decide or travel: none of HEAVY may be loaded by importing them.
LIGHT = (
    "engine",
    "engine.errors",
    "engine.config",
    "engine.messages",
    "engine.hub",
    "engine.kv",
    "engine.sched",
    "policylab.sim",
    "engine.text",
    "policylab.verify",
    "engine.core.engine_core",
)
# What a feature asks of the scheduler decides; only what its `compute` does needs a device, and
# what reads and places an adapter's tensors.
FEATURES = tuple(
    f"engine.{name}" for name in ("spec", "structured", "lora", "mm", "kv_transfer", "states")
)
COMPUTES = (
    *(
        "compute",
        "device_slots",
        "dora",
        "files",
        "kept",
        "parts",
        "placing",
        "products",
        "reading",
    ),
    *("attention", "encoding", "tower"),
    *("link", "peer_store", "server", "pool_blocks", "connector", "opening"),
)
# Of simulations only what runs the same jobs through an engine that computes, to compare them.
REAL = ("policylab.sim.real",)
NAMES_FEATURES = (
    *("engine.core.build", "policylab.sim.core", "policylab.sim.adapters", "policylab.sim.tiers"),
    *("policylab.verify.simulation", "policylab.verify.wild", "policylab.verify.adapters"),
    *("policylab.verify.pictures", "policylab.verify.tiers"),
)
LIGHT_INITS = ("engine.worker",)
DECISIONS = ("engine.kv", "engine.sched")
WORLD = ("time", "random", "secrets", "datetime", "uuid")

# Methods in which a configuration checks its own fields, which is not to read an option.
CHECKS = ("__post_init__", "_check_")
# Engines that only checks make: an option they set is not one that a user can.
TRIES = ("policylab.verify",)


def under(module: str, packages: tuple[str, ...]) -> str | None:
    """The longest of `packages` that holds `module`."""
    holders = [p for p in packages if module == p or module.startswith(p + ".")]
    return max(holders, key=len, default=None)


def light_modules() -> list[str]:
    inits = [name for name in LIGHT_INITS if name in tree.modules()]
    # `engine` itself is light, what lies under it need not be.
    return inits + [
        name
        for name in tree.modules()
        if name == "engine"
        or (under(name, tuple(p for p in LIGHT if p != "engine")) and name not in REAL)
        or (under(name, FEATURES) and name.rpartition(".")[2] not in COMPUTES)
    ]


def test_every_module_has_a_layer() -> None:
    homeless = [
        name
        for name in tree.modules()
        if name not in (*HOLDERS, ALIAS) and under(name, tuple(LAYER_OF)) is None
    ]
    assert not homeless, f"add to LAYERS: {homeless}"


def upward(level_of: dict[str, int]) -> list[str]:
    """Imports of a place that is not below, among the packages and files that have a level."""
    wrong = []
    for name, module in tree.modules().items():
        home = under(name, tuple(level_of))
        for imported in module.imports:
            target = under(imported.module, tuple(level_of))
            if home is None or target in (None, home):
                continue
            if level_of[target] >= level_of[home]:
                wrong.append(f"{module.where}:{imported.line} imports {imported.module}")
    return wrong


def test_imports_go_down() -> None:
    assert not (wrong := upward(LAYER_OF)), "\n".join(wrong)


def test_imports_inside_the_scheduler_go_down() -> None:
    floors = {f"engine.sched.{n}": level for level, names in enumerate(SCHED) for n in names}
    assert not (wrong := upward(floors)), "\n".join(wrong)


def writes(nodes: Iterable[ast.AST], columns: tuple[str, ...]) -> list[int]:
    """Lines that assign to places of these columns, as in ``table.slot.at[row] = 0``."""
    stored = [
        node
        for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    ]
    return [
        node.lineno
        for node in stored
        if isinstance(face := node.value, ast.Attribute)
        and face.attr in ("at", "all")
        and isinstance(face.value, ast.Attribute)
        and face.value.attr in columns
    ]


def test_only_the_table_writes_what_is_known_and_computed_of_a_request() -> None:
    columns = ("num_tokens", "num_computed", "num_pending", "in_flight")
    sample = ast.walk(ast.parse("t.num_tokens.at[1] += 1\nt.in_flight.all[x] = y = z"))
    assert writes(sample, columns) == [1, 2]
    wrong = [
        f"{module.where}:{line}"
        for name, module in tree.modules().items()
        if name != "engine.sched.table"
        for line in writes(module.nodes, columns)
    ]
    assert not wrong, wrong


def test_the_engine_imports_nothing_of_the_policy_lab_but_one_alias() -> None:
    found = {
        name
        for name, module in tree.modules().items()
        if under(name, ("policylab",)) is None
        for imported in module.imports
        if under(imported.module, ("policylab",))
    }
    assert found == {ALIAS}
    named = {
        name
        for name, module in tree.modules().items()
        if under(name, ("policylab",)) is None
        for node in module.nodes
        if isinstance(node, ast.Constant) and re.fullmatch(r"policylab(\.\w+)*", str(node.value))
    }
    assert named == {FORMER_NAMES}


def test_only_the_assembly_names_features() -> None:
    """A feature brings its own files and changes nothing in the scheduler or the worker."""
    wrong = [
        f"{module.where}:{imported.line} imports {imported.module}"
        for name, module in tree.modules().items()
        for imported in module.imports
        if (feature := under(imported.module, FEATURES))
        and under(name, (feature, *NAMES_FEATURES)) is None
    ]
    assert not wrong, "\n".join(wrong)


def test_the_picture_of_the_layers_is_up_to_date() -> None:
    written = layers.TARGET.read_text(encoding="utf-8")
    assert written == layers.document(), "run: python tools/layers.py"


def test_no_package_imports_in_a_circle() -> None:
    """Typing imports count: who needs a name to be understood needs the file to be read."""
    assert not (found := rules.circles(rules.imports_inside_packages(tree.modules()))), found


def test_no_module_imports_the_package_above_it() -> None:
    """`import engine` from within would tie every module to all public names."""
    wrong = [
        f"{module.where}:{i.line}"
        for module in tree.modules().values()
        for i in module.imports
        if i.module == "engine"
    ]
    assert not wrong, wrong


def test_lazy_imports_only_where_named() -> None:
    wrong = [
        f"{module.where}:{i.line} imports {i.module} inside a function"
        for name, module in tree.modules().items()
        for i in module.imports
        if i.is_lazy and name not in LAZY_IMPORTS
    ]
    assert not wrong, "\n".join(wrong)
    unused = [
        name
        for name in LAZY_IMPORTS
        if (module := tree.at(name)) is None or not any(i.is_lazy for i in module.imports)
    ]
    assert not unused, f"drop from LAZY_IMPORTS: {unused}"


def test_what_is_counted() -> None:
    """Sizes, and what ties a test to the inside: shown as warnings."""
    assert len(rules.test_files()) > 100, "nothing was read"
    house.count("larger than the budgets of tools/rules.py", list(rules.above(tree.modules())))
    house.count("a test reads what is private", rules.private_reads())


def test_every_test_asserts_something() -> None:
    assert not (found := rules.without_assertion()), found


def test_light_modules_cannot_reach_heavy_ones() -> None:
    wrong = []
    for name in light_modules():
        found = tree.reachable(name)
        wrong += [
            f"{name} loads {heavy} through {found[heavy]}" for heavy in HEAVY if heavy in found
        ]
    assert not wrong, "\n".join(wrong)


def test_decisions_read_no_clock_dice_or_environment() -> None:
    """The same inputs give the same plans, here and on a virtual clock.

    The class Random may be named: a generator that was given its seed is no dice.
    """
    wrong = []
    for name, module in tree.modules().items():
        if under(name, DECISIONS) is None:
            continue
        wrong += [
            f"{module.where}:{node.lineno} {ast.unparse(node)}"
            for node in module.nodes
            if reads_the_world(node)
        ]
    assert not wrong, "\n".join(wrong)


def reads_the_world(node: ast.AST) -> bool:
    match node:
        case ast.Import():
            return any(alias.name.split(".")[0] in WORLD for alias in node.names)
        case ast.ImportFrom(module=module) if module and module.split(".")[0] in WORLD:
            return ast.unparse(node) != "from random import Random"
        case ast.Attribute():
            return ast.unparse(node) in ("os.environ", "os.getenv", "np.random", "numpy.random")
        case ast.Call(func=ast.Name(id="Random")):
            return not node.args
    return False


def test_only_one_module_reads_the_environment() -> None:
    wrong = [
        f"{m.where}:{node.lineno}"
        for name, m in tree.modules().items()
        for node in m.nodes
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("os.environ", "os.getenv")
        # The kernels know nothing of the engine, and must read theirs before they are compiled.
        # Proofs change it for policies, which must not depend on it.
        # What describes a node of a cluster runs there before anything of the engine.
        and name
        not in (
            "engine.config.env",
            "engine.cluster.nodes.node",
            "kernels.cpu.isa",
            "policylab.verify.otherwise",
        )
    ]
    assert not wrong, wrong


def test_no_global_statement_and_no_pickle() -> None:
    wrong = []
    for module in tree.sources():
        wrong += [
            f"{module.where}:{node.lineno} global {', '.join(node.names)}"
            for node in module.nodes
            if isinstance(node, ast.Global)
        ]
        wrong += [
            f"{module.where}:{i.line} imports {i.module}"
            for i in module.imports
            if i.module.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "marshal")
        ]
    assert not wrong, "\n".join(wrong)


def config_classes() -> list[tuple[tree.Module, ast.ClassDef]]:
    return [
        (module, cls)
        for name, module in tree.modules().items()
        if under(name, ("engine.config",))
        for cls in module.classes()
        if any("dataclass" in ast.unparse(mark) for mark in cls.decorator_list)
    ]


def fields_with_docs(cls: ast.ClassDef) -> dict[str, bool]:
    """Fields of a class -> whether a docstring follows it."""
    after = [*cls.body[1:], None]
    return {
        ast.unparse(node.target): isinstance(follower, ast.Expr)
        and isinstance(follower.value, ast.Constant)
        and isinstance(follower.value.value, str)
        for node, follower in zip(cls.body, after, strict=True)
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
    }


def test_every_config_field_is_documented() -> None:
    wrong = [
        f"{module.where} {cls.name}.{field}"
        for module, cls in config_classes()
        for field, has_doc in fields_with_docs(cls).items()
        if not has_doc
    ]
    assert not wrong, "\n".join(wrong)


def test_every_config_field_has_a_reader() -> None:
    """An option nobody reads is a promise nobody keeps."""
    read = {name for module in tree.modules().values() for name in attributes_read(module)}
    wrong = [
        f"{module.where} {cls.name}.{field}"
        for module, cls in config_classes()
        for field in fields_with_docs(cls)
        if field not in read
    ]
    assert not wrong, "\n".join(wrong)


def option_groups() -> dict[str, set[str]]:
    """The classes that ``EngineArgs`` is made of -> their fields, which users may set."""
    classes = {cls.name: cls for _, cls in config_classes()}
    assert not fields_with_docs(classes["EngineArgs"]), "an option belongs to a group"
    groups = map(ast.unparse, classes["EngineArgs"].bases)
    return {group: set(fields_with_docs(classes[group])) for group in groups}


def test_every_option_is_of_one_group() -> None:
    groups = list(option_groups().values())
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_every_config_field_has_a_writer() -> None:
    """An option that no user can set is no option; all else is decided by some call."""
    groups = option_groups()
    written = {
        name
        for module in tree.modules().values()
        if under(module.name, TRIES) is None
        for name in arguments_given(module)
    }
    wrong = [
        f"{module.where} {cls.name}.{field}"
        for module, cls in config_classes()
        for asked in [set().union(*(groups.get(name, ()) for name in own_and_bases(cls)))]
        for field in fields_with_docs(cls)
        if field not in asked and (cls.name, field) not in written
    ]
    assert not wrong, "\n".join(wrong)


def own_and_bases(cls: ast.ClassDef) -> list[str]:
    return [cls.name, *map(ast.unparse, cls.bases)]


def arguments_given(module: tree.Module) -> set[tuple[str, str]]:
    """Class and keyword of each call in a module that makes an object with keywords.

    ``part(Class, options, field=value)`` makes one too.
    """
    return {
        (ast.unparse(node.args[0] if is_part(node) else node.func), keyword.arg or "")
        for node in module.nodes
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    }


def is_part(node: ast.Call) -> bool:
    return ast.unparse(node.func) == "part" and bool(node.args)


def attributes_read(module: tree.Module) -> set[str]:
    """Attributes a module reads; neither a config's own check nor handing a field on is reading."""
    idle: set[ast.AST] = set()
    if under(module.name, ("engine.config",)):
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef) and node.name.startswith(CHECKS):
                idle |= set(ast.walk(node))
            elif isinstance(node, ast.keyword) and ast.unparse(node.value) == f"self.{node.arg}":
                idle.add(node.value)
    return {
        node.attr
        for node in module.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in idle
    }
