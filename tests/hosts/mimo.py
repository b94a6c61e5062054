"""The shipped model and its MTP layer as one checkpoint of MiMo, which vLLM loads.

MiMo's heads are as large as the hidden size divided by their number. So the attention gets a head whose outputs have
the weight 0, and each head its own copy of the keys and values: outputs do not change.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.models.shipped import SHIPPED_HEADS, SHIPPED_MODEL

FILE = "model.safetensors"


@contextmanager
def target_of(network: str) -> Iterator[Path]:
    """Yield the folder of the target that has a network: this checkpoint for "mtp", the shipped model for others."""
    if network != "mtp":
        yield SHIPPED_MODEL
        return
    with tempfile.TemporaryDirectory(prefix="ssd-") as parent:
        folder = Path(parent) / "mimo"
        shutil.copytree(SHIPPED_MODEL, folder)
        _write(folder)
        yield folder


def _write(folder: Path) -> None:
    """Write the weights and the configuration over those of the shipped model."""
    import torch
    from safetensors.torch import load_file, save_file

    head = SHIPPED_HEADS / "mtp"
    config = json.loads((head / "config.json").read_text())
    heads, size = config["num_attention_heads"], config["head_dim"]
    count = config["hidden_size"] // size
    of_keys = [*(index * config["num_key_value_heads"] // heads for index in range(heads)), *[0] * (count - heads)]
    tensors = {}
    for name, tensor in {**load_file(folder / FILE), **load_file(head / FILE)}.items():
        if ".q_proj." in name:
            tensor = torch.cat([tensor, tensor.new_zeros((count - heads) * size, *tensor.shape[1:])])
        elif ".k_proj." in name or ".v_proj." in name:
            tensor = tensor.unflatten(0, (-1, size))[of_keys].flatten(0, 1)
        elif ".o_proj." in name:
            tensor = torch.cat([tensor, tensor.new_zeros(len(tensor), (count - heads) * size)], 1)
        tensors[name] = tensor.contiguous()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            bias = name.replace(".weight", ".bias")
            tensors.setdefault(bias, tensor.new_zeros(len(tensor)))
    save_file(tensors, folder / FILE)
    config |= {"num_attention_heads": count, "num_key_value_heads": count}
    (folder / "config.json").write_text(json.dumps(config))
