"""What this machine can do at most: matrix products and memory reads through torch, as one JSON line."""

import json
import time
from collections.abc import Callable

import torch
from common import NUM_THREADS

GEMM_SHAPES = ((2048, 2048, 2048), (64, 576, 1536), (256, 576, 1536), (1, 576, 1536), (256, 576, 49152))
INT8_SHAPES = GEMM_SHAPES[:3]


def seconds_per_call(function: Callable[[], object], at_least_s: float = 1.5) -> float:
    """Mean time of a call, over at least that long, after three calls to warm up."""
    for _ in range(3):
        function()
    num_calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < at_least_s:
        function()
        num_calls += 1
    return (time.perf_counter() - start) / num_calls


def measure_products(figures: dict[str, float]) -> None:
    """GFLOP/s of linear layers in both dtypes, GOP/s of int8 products."""
    for dtype in (torch.bfloat16, torch.float32):
        for m, k, n in GEMM_SHAPES:
            a, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            secs = seconds_per_call(lambda a=a, w=w: torch.nn.functional.linear(a, w))
            figures[f"{str(dtype)[6:]} [{m},{k}]x[{k},{n}] GFLOP/s"] = round(2 * m * k * n / secs / 1e9, 1)
    for m, k, n in INT8_SHAPES:
        a = torch.randint(-100, 100, (m, k), dtype=torch.int8)
        w = torch.randint(-100, 100, (n, k), dtype=torch.int8).t()
        secs = seconds_per_call(lambda a=a, w=w: torch._int_mm(a, w))
        figures[f"int8 [{m},{k}]x[{k},{n}] GOP/s"] = round(2 * m * k * n / secs / 1e9, 1)


def measure_memory(figures: dict[str, float]) -> None:
    """GB/s of a copy, and of reads that miss or may hit the last cache."""
    source = torch.empty(1 << 30, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    figures["copy 1 GiB GB/s (read and write)"] = round(
        2 * source.numel() / seconds_per_call(lambda: target.copy_(source)) / 1e9, 1
    )
    for name, num_bytes in (("read 1 GiB GB/s", 1 << 30), ("read 256 MiB GB/s", 1 << 28)):
        floats = source[:num_bytes].view(torch.float32)
        figures[name] = round(num_bytes / seconds_per_call(floats.sum) / 1e9, 1)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(NUM_THREADS)
    figures: dict[str, float] = {}
    with torch.inference_mode():
        measure_products(figures)
        measure_memory(figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
