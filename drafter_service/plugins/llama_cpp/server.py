"""The server of llama-cpp-python with drafts; its options are those of `python -m llama_cpp.server`.

    python -m drafter_service.plugins.llama_cpp.server --model model.gguf

The host's own option `--draft_model` offers no other draft model than prompt lookup.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from drafter_service.plugins.llama_cpp import SsdDraftModel


def main() -> None:
    """Run the server until it is stopped. The plug-in's settings are read from `SSD_PLUGIN`."""
    from llama_cpp.server.__main__ import main as run_server
    from llama_cpp.server.model import LlamaProxy

    load = LlamaProxy.load_llama_from_model_settings
    with ExitStack() as drafts:

        def load_with_drafts(settings: Any) -> Any:
            drafts.close()  # The server has one model at a time, and has closed the last one.
            llama = load(settings)
            llama.draft_model = drafts.enter_context(SsdDraftModel(llama))
            return llama

        LlamaProxy.load_llama_from_model_settings = staticmethod(load_with_drafts)
        run_server()


if __name__ == "__main__":
    main()
