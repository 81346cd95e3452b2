"""What the machine does while something is measured: clocks, temperature and power of the GPUs, asked of NVIDIA's
driver, and the speed of the host."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

PERIOD = 0.1  # seconds between two samples
# What lowers clocks, by the bits of NVML's clock event reasons.
SLOWED_BY = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "temperature", 0x40: "hardware, temperature",
             0x80: "hardware, power brake"}  # fmt: skip


def driver() -> Any:
    """NVML, ready to be asked. Raises ImportError without nvidia-ml-py, or NVML's own error without a driver."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def processes(gpus: list[str]) -> dict[int, int | None]:
    """Those that compute on GPUs named as in CUDA_VISIBLE_DEVICES, and how many bytes of one each has, None if the
    driver does not say; none is known of without a driver to ask."""
    try:
        ask = driver()
    except Exception:
        return {}
    found = {}
    for gpu in gpus:
        by_index = gpu.isdigit()
        handle = ask.nvmlDeviceGetHandleByIndex(int(gpu)) if by_index else ask.nvmlDeviceGetHandleByUUID(gpu)
        running = ask.nvmlDeviceGetComputeRunningProcesses(handle)
        found |= {process.pid: process.usedGpuMemory for process in running}
    return found


class Sampler:
    """A thread that takes a sample every PERIOD while the context is open, the first one before."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(PERIOD):
            self._sample()


class Watch(Sampler):
    """Samples of every GPU of the machine.

    Without nvidia-ml-py (a requirement of FlashInfer, so of every vLLM here) or a driver there are none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._samples: list[tuple[float, list[dict[str, int]]]] = []

    def __enter__(self) -> Watch:
        try:
            self._nvml = driver()
        except Exception as error:
            self.problem = f"no samples: {error}"
            return self
        self.problem = ""
        count = self._nvml.nvmlDeviceGetCount()
        self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        super().__enter__()
        return self

    def _run(self) -> None:
        try:
            super()._run()
        except Exception as error:  # the last sample says nothing of what comes after it
            self.problem = f"no samples to the end: {error}"

    def _sample(self) -> None:
        ask = self._nvml
        values = [
            {
                "sm_mhz": ask.nvmlDeviceGetClockInfo(gpu, ask.NVML_CLOCK_SM),
                "memory_mhz": ask.nvmlDeviceGetClockInfo(gpu, ask.NVML_CLOCK_MEM),
                "temperature_c": ask.nvmlDeviceGetTemperature(gpu, ask.NVML_TEMPERATURE_GPU),
                "power_w": ask.nvmlDeviceGetPowerUsage(gpu) // 1000,
                "slowed": ask.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
            }
            for gpu in self._gpus
        ]
        self._samples.append((time.monotonic(), values))

    def summary(self, since: float = 0.0) -> list[dict[str, Any]] | str:
        """Of each GPU, [least, median, most] of the samples since `since` (`time.monotonic`), or of the last."""
        if self.problem:
            return self.problem
        taken = [values for at, values in self._samples if at >= since] or [self._samples[-1][1]]
        found = []
        for samples in zip(*taken, strict=True):
            one: dict[str, Any] = {}
            for key in ("sm_mhz", "memory_mhz", "temperature_c", "power_w"):
                values = [sample[key] for sample in samples]
                one[key] = [min(values), statistics.median_low(values), max(values)]
            one["slowed_by"] = [name for bit, name in SLOWED_BY.items() if any(s["slowed"] & bit for s in samples)]
            found.append(one)
        return found


class HostWatch(Sampler):
    """How long the same loop of Python takes: where steps wait for the processor, a slower one makes a slower
    server."""

    def __init__(self) -> None:
        import psutil  # vLLM has it; where only kernels are measured, it may not be there

        super().__init__()
        self._cpu_times = psutil.cpu_times_percent  # since the call before
        self._loops: list[float] = []

    def __enter__(self) -> HostWatch:
        self._cpu_times()
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._cores = self._cpu_times()

    def _sample(self) -> None:
        began = time.perf_counter()
        for _ in range(20_000):
            pass
        self._loops.append((time.perf_counter() - began) * 1e6)

    def summary(self) -> dict[str, Any]:
        """Parts of all cores' time, and [least, median, most] of the loop. Once the context is closed."""
        loop = [round(value) for value in (min(self._loops), statistics.median(self._loops), max(self._loops))]
        return {"idle_percent": self._cores.idle, "stolen_percent": self._cores.steal, "loop_us": loop}
