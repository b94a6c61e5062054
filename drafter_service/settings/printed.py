"""Print settings as a TOML file in which each has its meaning as a comment."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import tomli_w
from pydantic import TypeAdapter

from drafter_service.settings.tree import ServiceConfig

PASSWORD = re.compile(r"(://[^/@:]*:)[^/@]*@")
WIDTH = 120
NOT_SERVED = "drafting.options"
"""Settings of third-party drafters, which the service refuses."""


def to_toml(config: ServiceConfig) -> str:
    """Return settings as a file that `load_settings` reads, with passwords masked.

    Settings without a value are comments, such as `#folder = ""`.
    """
    tree = TypeAdapter(ServiceConfig).dump_python(config, mode="json")
    if tree["log"]["url"] is not None:
        tree["log"]["url"] = PASSWORD.sub(r"\1***@", tree["log"]["url"])
    return "\n\n".join(_blocks(tree, ServiceConfig)) + "\n"


def meanings(section: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass, in one line each."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    return {
        node.target.id: " ".join(ast.literal_eval(text.value).split())
        for node, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(text, ast.Expr)
    }


def _blocks(tree: dict[str, Any], section: type, path: str = "") -> Iterator[str]:
    """Yield the settings of a section and its heading, then tables and sections within it."""
    hints, explained = get_type_hints(section), meanings(section)
    names = [field.name for field in fields(section) if f"{path}{field.name}" != NOT_SERVED]
    tables = [name for name in names if isinstance(tree[name], dict)]
    if path:
        purpose = (section.__doc__ or "").partition(". ")[0].rstrip(".")
        yield f"{_comment(f'{purpose}.')}\n[{path.rstrip('.')}]"
    for name in names:
        if name not in tables:
            line = f'#{name} = ""' if tree[name] is None else tomli_w.dumps({name: tree[name]}).rstrip()
            yield f"{_comment(explained[name])}\n{line}"
    for name in tables:
        kind: type = hints[name]
        if is_dataclass(kind):
            yield from _blocks(tree[name], kind, f"{path}{name}.")
        else:
            rows = tomli_w.dumps(tree[name]).rstrip()
            yield f"{_comment(explained[name])}\n[{path}{name}]" + (f"\n{rows}" if rows else "")


def _comment(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
