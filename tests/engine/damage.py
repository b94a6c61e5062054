"""Change files of a folder with weights, mostly so that it must be refused."""

import json

from safetensors.torch import load_file, save_file


def edit_json(path, **changes):
    """Change fields of a JSON object; None removes one."""
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def config(**changes):
    """Return a function that changes fields of a folder's `config.json`; None removes one."""
    return lambda folder: edit_json(folder / "config.json", **changes)


def tensor(name, change):
    """Return a function that changes a tensor of a folder with one file of weights.

    change: the new tensor, None to remove it, or a function of the present one.
    """

    def harm(folder):
        [path] = folder.glob("*.safetensors")
        tensors = load_file(path)
        given = tensors.pop(name, None)
        changed = change(given) if callable(change) else change
        save_file(tensors if changed is None else {**tensors, name: changed.contiguous()}, path)

    return harm


def set_to(index, value):
    """Return a function for `tensor` that sets one value, by its index in the flat tensor."""

    def change(given):
        given.view(-1)[index] = value
        return given

    return change


def removed(name):
    """Return a function that removes a file of a folder."""
    return lambda folder: (folder / name).unlink()


def written(name, text):
    """Return a function that writes a text into a file of a folder."""
    return lambda folder: (folder / name).write_text(text)


def cut(name, share):
    """Return a function that keeps the first share of a file of a folder."""

    def harm(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return harm
