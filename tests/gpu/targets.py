"""The GPUs that programs are checked for, as XLA is told of them where there is none.

Figures are those of NVIDIA's data sheets and of the technical specifications by compute
capability in the CUDA programming guide.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmjax_kernels.gpu import Gpu

CUDA, CUDNN, DRIVER = (12, 9, 0), (9, 10, 0), (13, 0, 0)
REGISTERS = 65536
"""Of a multiprocessor."""
THREADS = 2048
"""Likewise."""
BLOCK_OVERHEAD = 1024
"""Bytes of shared memory that the system takes of each block."""


@dataclass(frozen=True)
class Target:
    """Attributes:
    name: the device's kind.
    arch: as ptxas says it.
    shared: bytes of shared memory of a multiprocessor; a block may have 1 KiB less.
    memory: bytes of the device, `bandwidth` of it a second.
    cache: bytes of L2.
    clock: GHz.
    lanes: float32 units of a multiprocessor.
    """

    name: str
    gpu: Gpu
    arch: str
    shared: int
    memory: int
    bandwidth: int
    cache: int
    clock: float
    lanes: int

    @property
    def shared_of_block(self) -> int:
        return self.shared - BLOCK_OVERHEAD

    def config(self) -> str:
        """XLA's GpuTargetConfigProto as text."""
        major, minor = divmod(self.gpu.compute_capability, 10)
        features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        cuda, cudnn, driver = (".".join(map(str, v)) for v in (CUDA, CUDNN, DRIVER))
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {THREADS}
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared}
  shared_memory_per_block_optin: {self.shared_of_block}
  core_count: {self.gpu.multiprocessors} fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: {REGISTERS} registers_per_block_limit: {REGISTERS}
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache}
  device_memory_size: {self.memory} clock_rate_ghz: {self.clock}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{self.name}"
  driver_version: "{driver}" runtime_version: "{cuda}"
  compile_time_toolkit_version: "{cuda}" dnn_version: "{cudnn}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
device_description_str: "{self.name}"
"""


_HOPPER = {"gpu": Gpu(90, 132), "arch": "sm_90a", "shared": 233472, "cache": 52_428_800}
TARGETS = {
    "a100": Target(
        "NVIDIA A100-SXM4-80GB",
        Gpu(80, 108),
        "sm_80",
        shared=167936,
        memory=85_100_068_864,
        bandwidth=2_039_000_000_000,
        cache=41_943_040,
        clock=1.41,
        lanes=64,
    ),
    "h100": Target(
        "NVIDIA H100 80GB HBM3",
        memory=84_942_979_072,
        bandwidth=3_352_000_000_000,
        clock=1.98,
        lanes=128,
        **_HOPPER,
    ),
    "h200": Target(
        "NVIDIA H200",
        memory=150_754_820_096,
        bandwidth=4_800_000_000_000,
        clock=1.98,
        lanes=128,
        **_HOPPER,
    ),
}
