"""Drafts for llama-cpp-python, one model at a time.

    llama = Llama("model.gguf", logits_all=True)
    llama.draft_model = SsdDraftModel(llama)

`python -m drafter_service.plugins.llama_cpp.server` is the host's server with drafts.
"""

from drafter_service.plugins.llama_cpp.draft_model import SsdDraftModel

__all__ = ["SsdDraftModel"]
