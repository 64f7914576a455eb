"""GPUs by name: peak rates, bandwidths of memory and links, and the efficiency that training reaches. Pure.

All rates are per GPU as torch counts devices; FLOP/s are dense (without structured sparsity), links in one direction.
"""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from accel_fsdp.errors import UsageError, did_you_mean
from accel_fsdp.hardware.machines import MachineFacts, has_bf16

ASSUMED_EFFICIENCY = 0.55
"""Share of the peak that matrix products reach without a public run: the lowest measured one, H100's, rounded."""

INLINE_ECC = frozenset({"T4", "A10", "A10G", "L4", "A40", "L40", "L40S"})
"""Data-centre cards with GDDR memory, sold with error correction on, which takes a sixteenth of it."""

REPORTED_SHARE = 0.985
"""Share of the memory sold (less error correction) that CUDA reports as a card's total, where no report is known: those
in the table are 0.98 to 0.992 of it."""

NPU_MEMORY = "64GB"
"""Memory of an Ascend 910B (vllm-ascend#9337). Its bandwidth is published as 0.4 to 1.6 TB/s, not by the vendor."""

CALIBRATED = frozenset({"A100", "H100", "RTX 3090", "RTX 4090"})
"""GPUs whose efficiency was found from public runs; where another row has one, the chip is one of these in another
form."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    `memory_gib` is the size that the vendor sells, or that the caller gave to `find`; `usable_gib` the size that CUDA
    reports, estimated where no report is known (`reported_gib`).

    `half_flops` are bf16 or fp16 with float32 sums, `fp32_flops` plain float32: torch leaves TF32 off by default.
    `link_bytes_per_s` joins GPUs of one machine (NVLink, or PCIe where a bridge is optional), `pcie_bytes_per_s` leads
    to the host. `network_bytes_per_s` is one GPU's share of a usual cluster's network: an assumption, never measured
    here. `efficiency` is the share of the peak that matrix products reach in training. `source` names the vendor's
    document.
    """

    name: str
    memory_gib: float
    reported_gib: float | None
    half_flops: float
    fp32_flops: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    pcie_bytes_per_s: float
    network_bytes_per_s: float
    efficiency: float
    source: str

    @cached_property
    def has_bf16(self) -> bool:
        """Whether the GPU is of the Ampere generation or newer (compute capability 8.0)."""
        return has_bf16(MachineFacts(self.name, 1))

    @property
    def has_expandable_segments(self) -> bool:
        return MachineFacts(self.name, 1).has_expandable_segments

    @property
    def usable_gib(self) -> float:
        estimated = self.memory_gib * (15 / 16 if self.name in INLINE_ECC else 1) * REPORTED_SHARE
        return self.reported_gib or estimated

    @property
    def calibrated(self) -> bool:
        return self.name in CALIBRATED


def _gpu(
    name: str,
    memory: float,
    reported: float | None,
    half: float,
    fp32: float,
    hbm: float,
    link: float,
    pcie: float,
    network: float,
    efficiency: float | None,
    source: str,
) -> Gpu:
    rates = (half * 1e12, fp32 * 1e12, hbm * 1e9, link * 1e9, pcie * 1e9, network * 1e9)
    return Gpu(name, memory, reported, *rates, efficiency or ASSUMED_EFFICIENCY, source)


# In the units of datasheets: GiB sold, GiB reported, TFLOP/s in half and float32, GB/s of memory, of the link to
# its neighbours, of PCIe (16 lanes of generation 3, 4 and 5 are 16, 32 and 64 one way) and of the network: 50 is
# 400 Gb/s InfiniBand per GPU (DGX H100), 25 is 200 Gb/s (DGX A100), 12.5 is 100 Gb/s. Those are assumptions, as
# clusters differ.
#
# GiB reported is the total as CUDA reports it (`torch.cuda.mem_get_info`, "GPU 0 has a total capacity of ..." of an
# out-of-memory error). Looked up in GitHub issues: Open-Sora 697 (T4), DenseCLIP 52 (A100-40: 39.59), OOTDiffusion 235
# (A100-80), RB-Modulation 5 (A30), Phidias-Diffusion 8 (RTX 4090), GLM-4 730 (24 GB cards), NVlabs/Eagle 68 (L40),
# Step-Video-T2V 8 (L40S). The others are the usual totals of such messages, not looked up one by one. Drivers differ by
# 0.1 to 0.2 GiB: the lower number is used.
#
# The efficiencies were found together with the constants of `speed.py`, from published runs alone: A100 from
# llm-foundry's tables and fms-acceleration, H100 from llm-foundry, torchtitan, NeMo AutoModel and Accelerate, RTX 3090
# and 4090 from Answer.AI's fsdp_qlora (an RTX 4090 runs at 2.7 GHz where its whitepaper assumes 2.52).
# benchmarks/throughput_accuracy.py prints their errors.
# fmt: off
GPUS: tuple[Gpu, ...] = (
    _gpu("V100",          16, 15.77,    125,  15.7,  900, 150,  16, 12.5, None, "V100 datasheet (SXM2)"),
    _gpu("V100",          32, 31.73,    125,  15.7,  900, 150,  16, 12.5, None, "V100 datasheet (SXM2)"),
    _gpu("T4",            16, 14.75,     65,   8.1,  320,  16,  16, 12.5, None, "T4 datasheet"),
    _gpu("A10",           24, 22.02,    125,  31.2,  600,  32,  32, 12.5, None, "A10 datasheet"),
    _gpu("A10G",          24, 21.99,     70,    35,  600,  32,  32, 12.5, None, "A10G datasheet (AWS G5)"),
    _gpu("A30",           24,  23.5,    165,  10.3,  933,  32,  32, 12.5, None, "A30 datasheet"),
    _gpu("A40",           48, 44.34,  149.7,  37.4,  696,  32,  32, 12.5, None, "A40 datasheet"),
    _gpu("A100",          80, 79.25,    312,  19.5, 2039, 300,  32,   25, 0.75, "A100 datasheet (80GB SXM)"),
    _gpu("A100",          40, 39.39,    312,  19.5, 1555, 300,  32,   25, 0.75, "A100 datasheet (40GB SXM)"),
    _gpu("A100 PCIe",     80, 79.25,    312,  19.5, 1935,  32,  32, 12.5, 0.75, "A100 datasheet (80GB PCIe)"),
    _gpu("A100 PCIe",     40, 39.39,    312,  19.5, 1555,  32,  32, 12.5, 0.75, "A100 datasheet (40GB PCIe)"),
    # An A100, and further below an H100, with NVLink cut to 400 GB/s for both directions together: NVIDIA's statement
    # of 2022-11-07 on the A800, and "Insights into DeepSeek-V3" (2025) on the H800.
    _gpu("A800",          80,  None,    312,  19.5, 2039, 200,  32,   25, 0.75,
         "A100 datasheet, link: NVIDIA, 2022"),
    _gpu("A6000",         48,  47.5,  154.8,  38.7,  768,  32,  32, 12.5, None, "RTX A6000 datasheet"),
    _gpu("L4",            24, 22.03,    121,  30.3,  300,  32,  32, 12.5, None, "L4 datasheet"),
    _gpu("L40",           48,  44.4,    181,  90.5,  864,  32,  32, 12.5, None, "L40 datasheet"),
    _gpu("L40S",          48,  44.4,    362,  91.6,  864,  32,  32, 12.5, None, "L40S datasheet"),
    # GeForce cards can't reach each other's memory: what they send goes up to the host and down to the other, both at
    # once, as PCIe has a lane for each way. Between two RTX 4090, 24 GB/s of it remained (Answer.AI, with and without
    # sharding).
    _gpu("RTX 3090",      24, 23.68,     71,  35.6,  936,  32,  32, 12.5, 0.95, "GA102 whitepaper"),
    _gpu("RTX 4090",      24, 23.64,  165.2,  82.6, 1008,  32,  32, 12.5, 1.05, "Ada Lovelace whitepaper"),
    # Resellers in China double the memory.
    _gpu("RTX 4090",      48,  None,  165.2,  82.6, 1008,  32,  32, 12.5, 1.05, "Ada Lovelace whitepaper"),
    _gpu("RTX 5090",      32, 31.36,  209.5, 104.8, 1792,  64,  64, 12.5, None, "RTX Blackwell whitepaper"),
    _gpu("RTX 6000 Ada",  48,  47.4,  364.2,  91.1,  960,  32,  32, 12.5, None, "RTX 6000 Ada datasheet"),
    _gpu("RTX PRO 6000",  96,  None,  503.8,   126, 1792,  64,  64, 12.5, None,
         "RTX PRO 6000 Workstation datasheet"),
    _gpu("H100",          80,  79.1,  989.4,    67, 3350, 450,  64,   50, 0.56, "H100 datasheet (SXM)"),
    # Meta's Grand Teton, from which torchtitan's figures come: HBM2e, 500 W. Its peak lies between those of the forms
    # with 400 W (H100 NVL, 835) and 700 W (989.4), by power; torchtitan's benchmarks say as much.
    _gpu("H100",          96,  None,    886,    62, 2400, 450,  64,   50, 0.56, "torchtitan benchmarks, 2024-12"),
    _gpu("H800",          80,  None,  989.4,    67, 3350, 200,  64,   50, 0.56, "H100 datasheet, link: DeepSeek"),
    # An H100 with 78 of its 132 processors, and all of its NVLink.
    _gpu("H20",           96,  None,    148,    44, 4000, 450,  64,   50, None, "H20 product brief"),
    _gpu("H100 PCIe",     80,  79.1,    756,    51, 2039,  64,  64, 12.5, 0.56, "H100 datasheet (PCIe)"),
    _gpu("H100 NVL",      94,  None,    835,    60, 3938,  64,  64, 12.5, 0.56, "H100 NVL datasheet"),
    _gpu("H200",         141, 139.8,  989.4,    67, 4800, 450,  64,   50, 0.56, "H200 datasheet (SXM)"),
    # NVLink-C2C joins it to its host.
    _gpu("GH200",         96,  None,  989.4,    67, 4000, 450, 450,   50, 0.56, "GH200 datasheet (96GB)"),
    _gpu("GH200",        144,  None,  989.4,    67, 4900, 450, 450,   50, 0.56, "GH200 datasheet (144GB)"),
    _gpu("B200",         180, 178.3,   2250,    75, 7700, 900,  64,   50, None, "HGX B200 datasheet"),
    _gpu("B300",         270,  None,   2250,    75, 7700, 900,  64,  100, None, "HGX B300 datasheet"),
    _gpu("GB200",        186,  None,   2500,    80, 8000, 900, 450,   50, None, "GB200 NVL72 datasheet"),
    # torch sees each of the two dies of a card as a device: its row is half a card.
    _gpu("MI250X",        64,  None,  191.5, 23.95, 1638, 100,  32,   25, None, "MI250X datasheet, halved"),
    _gpu("MI300X",       192,  None, 1307.4, 163.4, 5300, 448,  64,   50, None, "MI300X datasheet"),
    _gpu("MI325X",       256,  None, 1307.4, 163.4, 6000, 448,  64,   50, None, "MI325X datasheet"),
    # Seven links of 153.6 GB/s both ways.
    _gpu("MI355X",       288,  None, 2516.6, 157.3, 8000, 538,  64,   50, None, "MI355X datasheet"),
)
# fmt: on

_NOISE = re.compile(
    r"NVIDIA|AMD|INSTINCT|TESLA|GEFORCE|QUADRO|GENERATION|BLACKWELL|WORKSTATION|SERVER|EDITION|SXM\d?|AC|HBM\w*|\d+GI?B",
    re.I,
)


def find(name: str, memory_gib: float | None = None) -> Gpu:
    """The GPU of a name as people or drivers write it: `H100`, `h100-80gb`, `NVIDIA H100 80GB HBM3`.

    Of several sizes it takes the nearest to `memory_gib`, or to the size in the name, else the first of the table.

    Raises:
        UsageError: the name is unknown, or the card does not exist with `memory_gib`.
    """
    plain_name = _plain(name)
    rows = [gpu for gpu in GPUS if _plain(gpu.name) == plain_name]
    if is_npu(name):
        raise UsageError(
            f"{name} is an NPU, for which no plan can be made.",
            why=f"a plan predicts the kernels and the allocator of GPUs; only the memory is known, {NPU_MEMORY}",
            fix=f"accel-fsdp config --gpus 8x{name}-{NPU_MEMORY}, which compares weights and moments with it",
        )
    if not rows:
        names, sized_name = {_plain(gpu.name): gpu.name for gpu in GPUS}, with_size(name)
        suggestion = f" Did you mean {sized_name}?" if sized_name else ""
        raise UsageError(
            f"{name} is an unknown GPU.{suggestion or did_you_mean(name, names.values())}",
            why="the step time depends on its peak, memory and links",
            fix=f"one of {', '.join(dict.fromkeys(names.values()))}",
        )
    sizes = [gpu.memory_gib for gpu in rows]
    if memory_gib and not _is_possible(memory_gib, sizes):
        typed, known = f"{memory_gib:g}GB", [f"{size:g}GB" for size in sizes]
        raise UsageError(
            f"{rows[0].name} does not exist with {typed} of memory.{did_you_mean(typed, known)}",
            why="a GPU's memory decides what fits",
            fix=f"--gpus with {' or '.join(f'{rows[0].name}-{size}' for size in known)}",
        )
    in_name = (gpu.memory_gib for gpu in rows if re.search(rf"\b{gpu.memory_gib:g}\s*gi?b\b", name, re.I))
    size = memory_gib or next(in_name, rows[0].memory_gib)
    nearest = min(rows, key=lambda gpu: abs(gpu.memory_gib - size))
    if memory_gib is None or memory_gib == nearest.memory_gib:
        return nearest
    is_reported = nearest.usable_gib * REPORTED_SHARE <= memory_gib < nearest.memory_gib  # as drivers report it
    return dataclasses.replace(nearest, memory_gib=memory_gib, reported_gib=memory_gib if is_reported else None)


def is_npu(name: str) -> bool:
    """Whether the name is Ascend's 910B or one of its editions (910B2), which Accelerate runs FSDP on."""
    return re.fullmatch(r"ascend910b[123]?", _plain(name)) is not None


def _is_possible(memory_gib: float, sizes: Iterable[float]) -> bool:
    """Whether a card is sold with this size, give or take what drivers keep, or can be divided into parts (MIG) of it.

    A part is at least an eighth of the card.
    """
    return any(abs(memory_gib * parts / size - 1) < 0.1 for size in sizes for parts in range(1, 9))


def with_size(name: str) -> str:
    """`H100-80` and `H100-80GB1` are `H100-80GB`; empty if no known GPU precedes a size."""
    match = re.fullmatch(r"(.+)[ -](\d+)(GI?B?\d*)?", name, re.I)
    return f"{match[1]}-{match[2]}GB" if match and is_known(match[1]) else ""


def sold_gib(name: str, reported_gib: float) -> float:
    """The size that a card is sold with, given the reported size: the nearest one in the table, else a rounded one."""
    sizes = [
        gpu.memory_gib
        for gpu in GPUS
        if _plain(gpu.name) == _plain(name) and abs(gpu.usable_gib / reported_gib - 1) < 0.1
    ]
    return min(sizes, key=lambda size: abs(size - reported_gib), default=float(round(reported_gib)))


def is_hopper(gpu: Gpu) -> bool:
    """Whether the GPU reaches its peak only with Hopper's instructions (compute capability 9.0)."""
    return gpu.name.startswith(("H100", "H20", "H800", "GH200"))


def is_known(name: str) -> bool:
    return _plain(name) in {_plain(gpu.name) for gpu in GPUS}


@cache
def _plain(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` and `rtx4090` are `4090`, `NVIDIA H100 80GB HBM3` is `h100`."""
    words = [word for word in re.split(r"[\s_-]+", name) if word and not _NOISE.fullmatch(word)]
    plain = "".join(words).lower()
    return re.sub(r"^rtx(?=a?\d{4}(?!ada))", "", plain)
