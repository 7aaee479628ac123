"""Devices in numbers: what their makers state, which share of it programs reach, and the time of given work on them.

Dense (not sparse) products, decimal units, one direction of a link. The shares are assumptions for this kind of
program, not measurements; every number can be set on the command line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from graftrl.errors import ConfigError
from graftrl.policies.costs import Work

GIB = 1024**3
LOCAL_OVERHEAD_S = 2e-4  # of a layer whose kernels Python starts one by one
GRAPH_OVERHEAD_S = 1e-5  # of a layer in a recorded graph, as samplers replay it
_LOGIT_BYTES = 32  # read and written for one logit on a GPU, between the head and the drawn token


@dataclass(frozen=True)
class Device:
    """bf16, fp32: operations per second of matrix products. bandwidth: of its memory, bytes per second. memory: bytes.
    link: bytes per second to devices of the same node, network: to others; node: devices in one. exps: exponentials per
    second, None where memory bounds them.

    Achieved shares: products, decode and attention of operations (in large products, in those of one token per row, and
    in the attention of one token per row), stream and traffic of bandwidth (weights, keys and values; what lies between
    products), links of links. overhead: seconds that a layer takes however small its work. search: seconds to find a
    drawn token in a large vocabulary. latency: of one hop of a collective, seconds.
    """

    name: str
    bf16: float
    fp32: float
    bandwidth: float
    memory: float
    link: float
    network: float
    node: int = 8
    exps: float | None = None
    products: float = 0.4
    decode: float = 0.4
    attention: float = 0.4
    stream: float = 0.7
    traffic: float = 0.7
    links: float = 0.7
    overhead: float = LOCAL_OVERHEAD_S
    search: float = 0.0
    latency: float = 2e-5

    def seconds(self, work: Work, width: int, *, decoding: bool = False, overhead: float | None = None) -> float:
        """A phase is bound by its products or by the bytes that stream past them; what lies between the products comes
        on top, and so does the time to start layers."""
        peak = self.bf16 if width == 2 else self.fp32
        if decoding:
            products = ((work.decoder + work.head) / self.decode + work.attention / self.attention) / peak
        else:
            products = work.operations / (peak * self.products)
        between = work.traffic / (self.bandwidth * self.traffic)
        logits = work.exps / self.exps if self.exps else work.exps * _LOGIT_BYTES / (self.bandwidth * self.traffic)
        started = work.layers * (self.overhead if overhead is None else overhead) + work.searches * self.search
        return max(products, work.bytes / (self.bandwidth * self.stream)) + between + logits + started

    def collective_seconds(self, size: float, devices: int) -> float:
        """Gathering, scattering or spreading `size` bytes over so many devices; 0 for one."""
        if devices <= 1:
            return 0.0
        bandwidth = (self.link if devices <= self.node else self.network) * self.links
        return size * (devices - 1) / devices / bandwidth + self.latency * math.ceil(math.log2(devices))


# Data sheets: NVIDIA H100 SXM5 80 GB, H200 SXM 141 GB, A100 SXM4 80 GB, L40S; fp32 without TF32. The network is one
# 400 Gb/s adapter a GPU (A100: 200, L40S: 200 for two). "cpu": one core of the cloud machine that the model was checked
# on, as `--device here` measured it.
DEVICES = {
    device.name: device
    for device in (
        Device("h100", 989e12, 67e12, 3.35e12, 80e9, 450e9, 50e9),
        Device("h200", 989e12, 67e12, 4.8e12, 141e9, 450e9, 50e9),
        Device("a100", 312e12, 19.5e12, 2.039e12, 80e9, 300e9, 25e9),
        Device("l40s", 362e12, 91.6e12, 864e9, 48e9, 32e9, 12.5e9),
        Device(
            "cpu",
            bf16=468e9,
            fp32=103e9,
            bandwidth=38e9,
            memory=8e9,
            link=38e9,
            network=1e9,
            node=64,
            exps=1.7e9,
            products=1.0,
            decode=0.99,
            attention=0.027,
            stream=1.0,
            traffic=0.13,
            overhead=2.5e-4,
            search=2.6e-5,
        ),
    )
}


def device_named(name: str) -> Device:
    """Raises ConfigError for an unknown name."""
    if name not in DEVICES:
        raise ConfigError(f"--device {name!r}: none of {', '.join(DEVICES)}, here")
    return DEVICES[name]


def without_communication(device: Device) -> Device:
    """The same device with links that take no time."""
    return replace(device, link=math.inf, network=math.inf, latency=0.0)
