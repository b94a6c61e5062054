"""The public interface is that of `public_api.txt`: names, signatures, fields and annotations.

Public is what `ssd` exports, what docs/api.md and docs/hosts/ name in full or import in an example, and entry points;
of a class, its fields, its special methods, and members that these pages name. Sources are read, not imported, so no
host is needed. Defaults of arguments are compared as they are written, so not the values of named constants.
"""

import ast
import re
from difflib import unified_diff
from functools import cache
from pathlib import Path

import ssd

ROOT = Path(__file__).parent.parent
SNAPSHOT = Path(__file__).with_name("public_api.txt")
DOCS = "\n".join(path.read_text() for path in [ROOT / "docs" / "api.md", *sorted((ROOT / "docs" / "hosts").iterdir())])
DOCUMENTED = set(re.findall(r"\w+", " ".join(re.findall(r"```.*?```|`[^`\n]+`", DOCS, re.DOTALL))))
PACKAGE = r"\b(?:ssd|drafter_service|engine)"
CHANGED = """
This is not the public interface of tests/public_api.txt. If the change is intended, follow the rule for deprecations in
CONTRIBUTING.md, describe it in docs/api.md and CHANGELOG.md, and run: python -m tests.test_public_api"""


def test_the_public_interface_is_unchanged():
    difference = unified_diff(SNAPSHOT.read_text().splitlines(), interface().splitlines(), lineterm="", n=1)
    assert not (lines := list(difference)), "\n".join([*lines, CHANGED])


def interface():
    """Return a line for each public name, and below it those of its members."""
    imports = re.findall(rf"^from ({PACKAGE}[\w.]*) import (.+)$", DOCS, re.MULTILINE)
    names = {f"{module}.{name}" for module, imported in imports for name in imported.split(", ")}
    names |= {f"ssd.{name}" for name in ssd.__all__} | {*re.findall(rf"{PACKAGE}(?:\.\w+)+", DOCS)}
    entries = re.findall(rf'"({PACKAGE}[\w.]*):(\w+)"', (ROOT / "pyproject.toml").read_text())
    lines = []
    for name in sorted({*names, *map(".".join, entries)}):
        if found := definition(name):
            lines.append(f"{name}: {text(found[1])}")
            lines += [f"    {member}" for _, member in sorted(members(*found).items())]
    return "\n".join(lines) + "\n"


@cache
def tree(module):
    """Return the syntax tree of a module; None: there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    files = [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return ast.parse(files[0].read_text()) if files else None


def definition(name):
    """Return the module that defines a name, and its syntax tree there; None: nothing defines it."""
    module, _, last = name.rpartition(".")
    for node in ast.walk((module and tree(module)) or ast.Module([], [])):
        if isinstance(node, ast.ImportFrom) and any(alias.name == last for alias in node.names):
            origin = f"{node.module}.{last}"
            return definition(origin) or ((origin, tree(origin)) if tree(origin) else None)
        # The value of a constant is the name of a class that the module makes on first use.
        named = [getattr(node, "name", None), getattr(node, "value", None)]
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        if last in [*named, *(getattr(target, "id", None) for target in targets)]:
            return module, node
    return None


def text(node):
    """Return a definition without its body."""
    if isinstance(node, ast.FunctionDef):
        decorators = "".join(f"@{ast.unparse(each)} " for each in node.decorator_list)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{decorators}def {node.name}({ast.unparse(node.args)}){returns}"
    kinds = {ast.Module: "module", ast.ClassDef: "class", ast.Constant: "class of a host"}
    return kinds.get(type(node)) or ast.unparse(node)


def members(module, node):
    """Return the texts of the public members of a class or a module, those of base classes included, by name."""
    if not isinstance(node, ast.Module | ast.ClassDef):
        return {}
    found = {}
    for base in reversed(getattr(node, "bases", [])):
        found |= members(*(definition(f"{module}.{ast.unparse(base).split('[')[0]}") or (module, None)))
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and (each.name in DOCUMENTED or re.match("__(?!post_init)", each.name)):
            found[each.name] = text(each)
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            stored = re.findall(r"\bself\.(\w+)(?=.* = )", ast.unparse(each))
            found |= {name: name for name in stored if name in DOCUMENTED}
        if isinstance(each, ast.AnnAssign | ast.Assign) and isinstance(node, ast.ClassDef):
            field = ast.unparse(getattr(each, "target", None) or each.targets[0])
            found |= {} if field.startswith("_") else {field: text(each)}
    return found


if __name__ == "__main__":
    SNAPSHOT.write_text(interface())
