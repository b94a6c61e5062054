"""Signatures of the hosts' classes and functions that plug-ins use, recorded from the hosts themselves.

`FILE.json` has, by module, a text per function and an object per class. A test that has the host compares them with it
(`record`); where it is missing, stand-ins are made of them (`stand_in`), so that a plug-in's code runs everywhere.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent


def load(host):
    """Return the recorded signatures of a host by module."""
    return json.loads((FOLDER / f"{host}.json").read_text())


def record(signatures):
    """Return the signatures of the same names as the installed host has them."""
    return {module: record_members(importlib.import_module(module), names) for module, names in signatures.items()}


def record_members(owner, names):
    recorded = {}
    for name, value in names.items():
        if not hasattr(owner, name):
            continue
        member = inspect.getattr_static(owner, name)
        if isinstance(value, dict):
            recorded[name] = record_members(member, value)
        elif isinstance(member, property):
            recorded[name] = "property"
        else:
            recorded[name] = signature_text(getattr(owner, name))
    return recorded


def signature_text(function):
    """Return the parameters of a function, without annotations and values of defaults."""
    parameters = [
        each.replace(annotation=each.empty, default=each.empty if each.default is each.empty else None)
        for each in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def stand_in(signatures, monkeypatch):
    """Put modules with the recorded names into `sys.modules`; their functions accept what they were recorded with."""
    for path, names in signatures.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in sys.modules:
                module = ModuleType(package)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, package, module)
                if end > 1:
                    monkeypatch.setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module, raising=False)
        for name, value in names.items():
            monkeypatch.setattr(sys.modules[path], name, stand_in_member(name, value), raising=False)


def stand_in_member(name, value):
    if isinstance(value, dict):
        return type(name, (), {each: stand_in_member(each, text) for each, text in value.items()})
    if value == "property":
        return property(lambda _: None)
    return eval(f"lambda {value[1:-1]}: None")
