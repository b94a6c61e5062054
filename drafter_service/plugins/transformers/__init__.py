"""Drafts for `generate` of Hugging Face transformers.

    ssd = SsdGenerate(model)
    model.generate(**inputs, custom_generate=ssd)
    with ssd.enabled():  # for code that calls `generate` itself
        model.generate(**inputs)

One sequence is decoded by the host's assisted decoding (`generate.py`), whose methods have private names, so only
versions that were tested are used. It does not support batches; `batch.py` decodes them with public methods. What
neither supports is decoded by the host as without this package, and one line in the host's log gives the reason
(`support.py`). transformers and torch, which belong to the caller, are imported inside functions.
"""

from __future__ import annotations

from drafter_service.plugins.transformers.generate import SsdGenerate

__all__ = ["SsdGenerate"]
