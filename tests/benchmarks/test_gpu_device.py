"""The tools of the GPU benchmark on a GPU."""

import pytest
import torch

from benchmarks.gpu.bench import TINY, Bench, Setting
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.shapes import SHAPES, random_model
from benchmarks.gpu.timeline import record, span
from benchmarks.support.resources import free_bytes, peak_bytes

pytestmark = pytest.mark.gpu


def test_random_weights_are_made_on_the_device():
    model = random_model(SHAPES["tiny"], torch.bfloat16, "cuda")
    assert {parameter.device.type for parameter in model.parameters()} == {model.frequencies.device.type} == {"cuda"}
    assert 0.019 < model.lm_head.weight.float().std().item() < 0.021


def test_kernels_are_recorded_without_copies():
    numbers = torch.randn(1 << 20, device="cuda")
    kernels = record(lambda: (numbers.sin(), numbers.clone(), numbers.cpu(), numbers.cos()))
    assert len(kernels) >= 2
    assert not any("Memcpy" in kernel.name for kernel in kernels)
    assert 0 < span(kernels) < 1e6


def test_memory_is_that_of_the_gpu():
    numbers = torch.empty(1 << 20, device="cuda")
    assert peak_bytes() >= numbers.numel() * 4
    assert 0 < free_bytes("cuda") < torch.cuda.mem_get_info()[1]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_parts_run_on_the_device(part, recorded):
    assert list(part.run(Bench(Setting("cuda", "bfloat16", "auto", "tiny", TINY, recorded))))
