"""An out-of-tree SGLang platform for machines without an accelerator.

SGLang 0.5.23 serves on a CPU only with AMX and its own CPU kernels. This platform lets it run the same
scheduler, radix cache and models in plain torch, for trying things out and for tests.
"""

from __future__ import annotations

import os


def activate() -> str | None:
    """The entry point: the platform's class path where there is no accelerator, None to leave SGLang its own."""
    import torch

    if torch.accelerator.is_available() or os.getenv("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return f"{__name__}.QuantKVCpuPlatform"


def __getattr__(name: str):
    # The class needs SGLang's platform package, which is being imported while it calls activate().
    if name == "QuantKVCpuPlatform":
        return _platform_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _platform_class() -> type:
    import psutil
    import torch
    from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

    class QuantKVCpuPlatform(SRTPlatform):
        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"
        capabilities = PlatformCapabilities()

        def get_device(self, device_id: int | None = None) -> str:
            return "cpu"

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def apply_server_args_defaults(self, server_args) -> None:
            # SGLang fills in a backend that needs AMX for the device "cpu".
            if server_args.attention_backend == "intel_amx":
                server_args.attention_backend = self.get_default_attention_backend()
            # An idle scheduler would spin on a core that requests need.
            server_args.sleep_on_idle = True

        def get_device_total_memory(self, device_id: int = 0) -> int:
            return psutil.virtual_memory().total

        def get_current_memory_usage(self, device: torch.device | None = None) -> float:
            # SGLang subtracts this from the total to get what is free.
            memory = psutil.virtual_memory()
            return memory.total - memory.available

        def get_compile_backend(self, mode: str | None = None) -> str:
            return "eager"

    return QuantKVCpuPlatform
