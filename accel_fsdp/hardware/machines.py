"""Machines as text: `8xH100-80GB`, `2x8xA100-40GB`, `H100 x 8`, `cpu`. Pure."""

import ipaddress
import re
from dataclasses import dataclass, replace

from accel_fsdp.errors import UsageError

AMD = re.compile(r"\b(AMD|INSTINCT|RADEON)\b|\bMI\d+", re.IGNORECASE)


@dataclass(frozen=True)
class MachineFacts:
    """One machine that will train, this one or a described one; `accelerator` is None without one.

    `memory_gib` is the memory of one accelerator, None if unknown.
    """

    accelerator: str | None
    count: int
    memory_gib: float | None = None

    @property
    def has_expandable_segments(self) -> bool:
        """Whether PyTorch's allocator has them. ROCm has had them only since 7.0, where a copy may hang.

        (pytorch/pytorch, pull request 179930 and issue 192259.)
        """
        return self.accelerator is not None and not AMD.search(self.accelerator)


CPU = MachineFacts(accelerator=None, count=0)
WITHOUT_BF16 = ("V100", "P100", "P40", "P4", "T4", "K80", "M60", "TITAN", "GTX", "QUADRO", "RTX 20", "RTX20")
"""GPUs older than Ampere, whose tensor cores know fp16 only (CUDA compute capability below 8.0)."""
_OLD = re.compile(rf"\b(?:{'|'.join(map(re.escape, WITHOUT_BF16))})", re.I)

MOST_GPUS = 1_000_000
"""The largest plausible number of GPUs; a larger one is taken for a typing error."""
MOST_PER_MACHINE, USUAL_PER_MACHINE = 16, 8
"""A machine has at most 16 GPUs (DGX-2, p2.16xlarge, eight MI250X with two dies each), and usually 8."""
LONGEST = 80
"""Letters of a description."""
LONGEST_NAME = 253
"""Letters of a host name (RFC 1035)."""
ADDRESS_WORDS = frozenset({"ip", "ipaddr", "addr", "address", "hostname", "placeholder", "changeme"})
"""Words for an address in templates, in place of a machine's name."""
RESERVED_DOMAIN = re.compile(r"(^|\.)(example(\.(com|net|org))?|invalid)$", re.IGNORECASE)
"""Domains that no machine is in (RFC 2606)."""

_MEMORY = r"(?:[ -](?P<memory>\d+)Gi?B)?"
_NUMBERED = r"(?P<name>(?:RTX[ -](?:PRO[ -])?)?(?:(?!x\d)[A-Za-z]+\d+\w*?|\d{4})(?:[ -][A-Za-z]+)?)"
_FORMS = (
    rf"{_NUMBERED}{_MEMORY}\s*x\s*(?P<count>\d+)",
    rf"(?:(?P<machines>\d+)\s*x\s*)?(?P<count>\d+)(?:\s*x\s*|\s+)(?P<name>(?:[A-Za-z]|\d{{4}})[\w .-]*?){_MEMORY}",
    rf"{_NUMBERED}{_MEMORY}",
)
"""`H100 x 8`; `8xH100-80GB`, `8 H100` and `2x8xH100`; a single GPU by a name that contains a number: `RTX 4090`."""
_PATTERNS = tuple(re.compile(form, re.I) for form in _FORMS)


def parse(text: str, flag: str = "--gpus") -> tuple[MachineFacts, int]:
    """Returns one machine and their number: `8xH100-80GB` is (8 H100 of 80 GiB, 1), `cpu` a machine without GPU.

    `8 H100` and `H100 x 8` are the same without the memory; a name alone, such as `h100`, is one GPU. `flag` is the
    source of the text.
    """
    plain = re.sub(r"[*\u00d7]", "x", text.strip())  # the sign of multiplication
    if plain.lower() == "cpu":
        return CPU, 1
    matches = (pattern.fullmatch(plain) for pattern in _PATTERNS) if len(text) < LONGEST else ()
    match = next(filter(None, matches), None)
    parts = match.groupdict() if match else {}
    count, machines, memory = (int(parts.get(name) or 1) for name in ("count", "machines", "memory"))
    if count * machines > MOST_GPUS:
        raise UsageError(
            f"{flag} {text[:LONGEST]} is {count * machines:,} GPUs",
            why=f"no cluster has more than {MOST_GPUS:,}",
            fix=f"{flag} 8xH100-80GB, or {flag} 2x8xA100-40GB for two machines",
        )
    if not parts or min(count, machines, memory) < 1:
        raise UsageError(
            f"{flag} {text[:LONGEST]} can't be read",
            why="it has to give the number and the kind of GPUs",
            fix=f"{flag} 8xH100-80GB, or {flag} 2x8xA100-40GB for two machines",
        )
    machine = MachineFacts(parts["name"].strip(), count, float(memory) if parts["memory"] else None)
    if count > MOST_PER_MACHINE:
        several = replace(machine, count=USUAL_PER_MACHINE)
        raise UsageError(
            f"{flag} {text[:LONGEST]} is one machine with {count:,} GPUs",
            why=f"a machine has at most {MOST_PER_MACHINE}, and a slower network joins several machines",
            fix=f"{flag} {as_typed(several, machines * -(-count // USUAL_PER_MACHINE))}: machines x GPUs of each",
        )
    return machine, machines


def parse_list(text: str, flag: str) -> dict[str, tuple[MachineFacts, int]]:
    """Parses descriptions with commas between them; returns each with the result of `parse`, in order."""
    machines: dict[str, tuple[MachineFacts, int]] = {}
    for word in (part.strip() for part in text.split(",")):
        parsed = parse(word, flag)
        if parsed in machines.values():
            raise UsageError(
                f"{flag} has {word} twice", why="each machine needs one row", fix=f"{flag} with {word} once"
            )
        machines[word] = parsed
    return machines


def describe(machine: MachineFacts) -> str:
    """The text that `parse` reads back, with the accelerator's plain name."""
    name = machine.accelerator
    return as_named(machine if name is None else replace(machine, accelerator=_plain_name(name)))


def as_named(machine: MachineFacts) -> str:
    """A machine as text, with the accelerator's name as given: the memory size may be in that name alone."""
    if machine.accelerator is None:
        return "cpu"
    memory = f"-{machine.memory_gib:.0f}GB" if machine.memory_gib else ""
    return f"{machine.count}x{machine.accelerator}{memory}"


def as_typed(machine: MachineFacts, number: int) -> str:
    """Several equal machines as text, with the accelerator's name as given: `2x8xH100`."""
    return f"{number}x{as_named(machine)}" if number > 1 else as_named(machine)


def _plain_name(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` is `H100`: the common name, without maker and memory; PCIe cards differ."""
    words = [
        word
        for word in re.split(r"[\s-]+", name)
        if not re.fullmatch(r"NVIDIA|GeForce|\d+GB|HBM\w*|SXM\d*", word, re.I)
    ]
    name = re.sub(r"[^\w. ]", "", " ".join(words)) or "GPU"
    return re.sub(r" (PCIe)\b", r"-\1", name, flags=re.I)


def address_problem(text: str) -> str:
    """Why machines can't connect at this address; empty if its form allows it."""
    if "://" in text:
        return "it is a URL, and the launcher takes only a host name or an IP address"
    bare = text.strip(":")  # ::1
    if not re.fullmatch(r"[^\W_]|[^\W_][\w.:-]*[^\W_]", bare, re.ASCII) or len(text) > LONGEST_NAME:
        return "a host name or an IP address has only letters, digits, dots and dashes"
    if text.count(":") == 1:
        return "the port has a separate question and key, main_process_port"
    if ":" in text or not re.search(r"[A-Za-z]", text):
        try:
            ipaddress.ip_address(text)
        except ValueError:
            return "it is not an IP address"
    if text.lower() in ("localhost", "::1", "::", "0.0.0.0") or text.startswith("127."):
        return "every machine uses that name for itself, so the others would not find it"
    return ""


def is_placeholder(address: str) -> bool:
    """Whether an address is a placeholder that is still to be filled in.

    Placeholders are words in capitals (HOST, MASTER_ADDR), x for digits (192.168.x.x), domains reserved for examples,
    and words about addresses (your_ip, master-address). A number makes it a real name: ip-10-0-0-1.
    """
    if re.fullmatch(r"[A-Z_-]{2,}|(.*\.)?x{1,3}(\..*)?", address) or RESERVED_DOMAIN.search(address):
        return True
    words, numbered = set(re.split(r"[^a-z]+", address.lower())), re.search(r"(?<![^\W\d_])\d", address)
    return "your" in words or (bool(words & ADDRESS_WORDS) and not numbered)


def has_bf16(machine: MachineFacts) -> bool:
    """Whether the accelerator computes in bf16 at full speed; a CPU does compute in it."""
    return not _OLD.search(machine.accelerator or "")
