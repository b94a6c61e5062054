"""vLLM's worker with the model runner of a variant."""

from __future__ import annotations

import functools
from typing import Any

from drafter_service.plugins.vllm import runner, speculator
from drafter_service.plugins.vllm.variants import Variant, choose


@functools.cache
def worker_class() -> type:
    """Return vLLM's worker, whose V2 model runner has drafts if the configuration says so."""
    from vllm.v1.worker.gpu_worker import Worker

    class DraftingWorker(Worker):  # type: ignore[misc]
        def _make_model_runner(self) -> Any:
            variant = choose(self.vllm_config).variant
            if variant is Variant.V2_SCHEDULER:
                return runner.runner_class()(self.vllm_config, self.device)
            if variant is Variant.V2_WORKER:
                return speculator.runner_class()(self.vllm_config, self.device)
            return super()._make_model_runner()

    return DraftingWorker
