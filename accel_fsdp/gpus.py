"""GPUs by name: what they compute, how fast their memory and links are, and how much of that training reaches. Pure.

All rates are per GPU as torch counts devices; FLOP/s are dense (without structured sparsity), links in one direction.
"""

import dataclasses
import re
from dataclasses import dataclass

from accel_fsdp.errors import UsageError, did_you_mean
from accel_fsdp.machines import has_bf16
from accel_fsdp.types import MachineFacts

ASSUMED_EFFICIENCY = 0.45
"""Share of the peak that matrix products reach where no public run tells: between the measured A100 and H100."""
PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9
"""16 lanes in one direction, bytes/s (PCI-SIG: 8, 16 and 32 GT/s per lane, rounded up as datasheets do)."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory is the caller's where `find` was told it, else what the vendor sells.

    `half_flops` are bf16 or fp16 with float32 sums, `fp32_flops` plain float32: torch leaves TF32 off by default.
    `link_bytes_per_s` joins GPUs of one machine (NVLink, or PCIe where a bridge is optional), `pcie_bytes_per_s` leads
    to the host. `network_bytes_per_s` is one GPU's share of a usual cluster's network: an assumption, never measured
    here. `efficiency` is the share of the peak that matrix products reach in training, `calibrated` says that public
    runs gave it. `source` names the datasheet.
    """

    name: str
    memory_gib: float
    half_flops: float
    fp32_flops: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    pcie_bytes_per_s: float
    network_bytes_per_s: float
    source: str
    efficiency: float = ASSUMED_EFFICIENCY
    calibrated: bool = False

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bf16 at `half_flops`; the older ones know fp16 only."""
        return has_bf16(MachineFacts(self.name, 1))


def _gpu(
    name: str, memory: float, half: float, fp32: float, hbm: float, source: str, *, link: float = 0,
    pcie: float = PCIE4, network: float = 12.5e9, efficiency: float | None = None,
) -> Gpu:  # fmt: skip
    """A row in the units of datasheets: GiB, TFLOP/s, GB/s. 12.5 GB/s is one 100 Gb/s port per GPU, an assumption."""
    reached, known = efficiency or ASSUMED_EFFICIENCY, efficiency is not None
    return Gpu(
        name, memory, half * 1e12, fp32 * 1e12, hbm * 1e9, link * 1e9 or pcie, pcie, network, source, reached, known
    )


# Network: 50 GB/s is 400 Gb/s InfiniBand per GPU (DGX H100), 25 GB/s 200 Gb/s (DGX A100, 8 HDR ports).
# Efficiency: calibrated with benchmarks/throughput_accuracy.py --fit, which prints the groups each value rests on.
_A100 = {"link": 300.0, "network": 25e9, "efficiency": 0.69}
_H100 = {"link": 450.0, "pcie": PCIE5, "network": 50e9, "efficiency": 0.5}
_BLACKWELL = {"link": 900.0, "pcie": PCIE5, "network": 50e9}
GPUS: tuple[Gpu, ...] = (
    _gpu("V100", 16, 125, 15.7, 900, "NVIDIA V100 datasheet (SXM2)", link=150, pcie=PCIE3),
    _gpu("V100", 32, 125, 15.7, 900, "NVIDIA V100 datasheet (SXM2)", link=150, pcie=PCIE3),
    _gpu("T4", 16, 65, 8.1, 320, "NVIDIA T4 datasheet", pcie=PCIE3),
    _gpu("A10", 24, 125, 31.2, 600, "NVIDIA A10 datasheet"),
    _gpu("A10G", 24, 70, 35, 600, "NVIDIA A10G datasheet (AWS G5)"),
    _gpu("A30", 24, 165, 10.3, 933, "NVIDIA A30 datasheet"),
    _gpu("A40", 48, 149.7, 37.4, 696, "NVIDIA A40 datasheet"),
    _gpu("A100", 80, 312, 19.5, 2039, "NVIDIA A100 datasheet (80GB SXM)", **_A100),
    _gpu("A100", 40, 312, 19.5, 1555, "NVIDIA A100 datasheet (40GB SXM)", **_A100),
    _gpu("A100 PCIe", 80, 312, 19.5, 1935, "NVIDIA A100 datasheet (80GB PCIe)", efficiency=_A100["efficiency"]),
    _gpu("A100 PCIe", 40, 312, 19.5, 1555, "NVIDIA A100 datasheet (40GB PCIe)", efficiency=_A100["efficiency"]),
    _gpu("A6000", 48, 154.8, 38.7, 768, "NVIDIA RTX A6000 datasheet"),
    _gpu("L4", 24, 121, 30.3, 300, "NVIDIA L4 datasheet"),
    _gpu("L40", 48, 181, 90.5, 864, "NVIDIA L40 datasheet"),
    _gpu("L40S", 48, 362, 91.6, 864, "NVIDIA L40S datasheet"),
    _gpu("RTX 3090", 24, 71, 35.6, 936, "NVIDIA GA102 whitepaper"),
    _gpu("RTX 4090", 24, 165.2, 82.6, 1008, "NVIDIA Ada GPU architecture whitepaper"),
    _gpu("RTX 5090", 32, 209.5, 104.8, 1792, "NVIDIA RTX Blackwell GPU architecture whitepaper", pcie=PCIE5),
    _gpu("RTX 6000 Ada", 48, 364.2, 91.1, 960, "NVIDIA RTX 6000 Ada datasheet"),
    _gpu("H100", 80, 989.4, 67, 3350, "NVIDIA H100 datasheet (SXM)", **_H100),
    _gpu("H100 PCIe", 80, 756, 51, 2039, "NVIDIA H100 datasheet (PCIe)", pcie=PCIE5, efficiency=_H100["efficiency"]),
    _gpu("H100 NVL", 94, 835, 60, 3938, "NVIDIA H100 NVL datasheet", pcie=PCIE5, efficiency=_H100["efficiency"]),
    _gpu("H200", 141, 989.4, 67, 4800, "NVIDIA H200 datasheet (SXM)", **_H100),
    # NVLink-C2C joins it to its host.
    _gpu("GH200", 96, 989.4, 67, 4000, "NVIDIA GH200 datasheet (96GB)", **{**_H100, "pcie": 450e9}),
    _gpu("GH200", 144, 989.4, 67, 4900, "NVIDIA GH200 datasheet (144GB)", **{**_H100, "pcie": 450e9}),
    _gpu("B200", 180, 2250, 75, 7700, "NVIDIA HGX B200 datasheet", **_BLACKWELL),
    _gpu("GB200", 186, 2500, 80, 8000, "NVIDIA GB200 NVL72 datasheet", **{**_BLACKWELL, "pcie": 450e9}),
    # torch sees each of the two dies of a card as a device.
    _gpu("MI250X", 64, 191.5, 23.95, 1638, "AMD Instinct MI250X datasheet, halved", link=100, network=25e9),
    _gpu("MI300X", 192, 1307.4, 163.4, 5300, "AMD Instinct MI300X datasheet", link=448, pcie=PCIE5, network=50e9),
)

_NOISE = re.compile(r"NVIDIA|AMD|INSTINCT|TESLA|GEFORCE|QUADRO|GENERATION|SXM\d?|HBM\w*|\d+GI?B", re.I)


def find(name: str, memory_gib: float | None = None) -> Gpu:
    """The GPU of a name as people or drivers write it: `H100`, `h100-80gb`, `NVIDIA H100 80GB HBM3`.

    Of two sizes the nearest to `memory_gib`, or to the size in the name, is taken, else the first of the table.

    Raises:
        UsageError: no GPU of that name is in the table.
    """
    asked = _plain(name)
    rows = [gpu for gpu in GPUS if _plain(gpu.name) == asked]
    if not rows:
        known = {_plain(gpu.name): gpu.name for gpu in GPUS}
        raise UsageError(
            f"{name} is no GPU that this tool knows.{did_you_mean(name, known.values())}",
            why="step time follows from its peak, memory and links",
            fix=f"one of {', '.join(dict.fromkeys(known.values()))}",
        )
    in_name = re.search(r"(\d+)\s*gi?b\b", name, re.I)
    told = memory_gib or (float(in_name[1]) if in_name else rows[0].memory_gib)
    nearest = min(rows, key=lambda gpu: abs(gpu.memory_gib - told))
    return nearest if memory_gib is None else dataclasses.replace(nearest, memory_gib=memory_gib)


def _plain(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` and `rtx4090` are `4090`, `NVIDIA H100 80GB HBM3` is `h100`."""
    words = [word for word in re.split(r"[\s_-]+", name) if word and not _NOISE.fullmatch(word)]
    plain = "".join(words).lower()
    return re.sub(r"^rtx(?=a?\d{4}(?!ada))", "", plain)
