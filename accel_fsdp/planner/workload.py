"""The inputs of a cost, from the flags of `accel-fsdp plan`: tokens or rows, prices, the disk's speed."""

import math
import re
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

from accel_fsdp.config import yaml_file
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import Gpu, gpus, machines
from accel_fsdp.planner.flags import PlanCommand
from accel_fsdp.prediction import cost

UNITS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
"""The powers of ten of a count's last letter."""
COUNT = r"(?P<number>(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d+)?(?:e\d{1,2})?)\s*(?P<unit>[a-z]?)"
"""A comma parts thousands: `1,5B` may be 1.5 billion, and is refused."""
LONGEST = 40
MOST = 10**18
"""The largest plausible number of tokens; beyond, a count is taken for a typing error."""
Prices = Mapping[tuple[str, float | None], float]


def count_of(text: str) -> int:
    """Parses a count: `2B` and `2e9` are 2,000,000,000, `1.5T` is 1,500,000,000,000."""
    match = re.fullmatch(COUNT, text.strip(), re.IGNORECASE | re.ASCII) if len(text) <= LONGEST else None
    power = UNITS.get(match["unit"].upper()) if match else None
    exact = Decimal(re.sub("[_,]", "", match["number"])).scaleb(power) if match and power is not None else Decimal(0)
    if exact < 1 or exact > MOST or exact != int(exact):
        raise UsageError(
            f"--tokens {text[:LONGEST]} is not a number of tokens",
            why="it has to be a whole number above 0; K, M, B and T mean 10^3, 10^6, 10^9 and 10^12",
            fix="--tokens 2B, --tokens 500M, --tokens 1.5T or --tokens 2000000000",
        )
    return int(exact)


def work_of(command: PlanCommand) -> cost.Work:
    """The amount of training, as far as the flags give it."""
    if command.tokens is not None and command.dataset_rows is not None:
        raise UsageError(
            "--tokens beside --dataset-rows", why="both say how much is trained", fix="leave out one of them"
        )
    if command.epochs is not None and (command.dataset_rows is None or command.args is not None):
        reason = "num_train_epochs of --args says it" if command.args else "the number of rows in an epoch is missing"
        fix = "leave out --epochs" if command.args else "--dataset-rows N --epochs E"
        raise UsageError(f"--epochs {command.epochs:g}", why=reason, fix=fix)
    for flag, value in (("--dataset-rows", command.dataset_rows), ("--eval-rows", command.eval_rows)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} is less than 1", why="there would be nothing to read", fix=f"{flag} 1000")
    if command.eval_rows is not None and command.args is None:
        raise UsageError(
            "--eval-rows without --args",
            why="the script's arguments say whether and when it evaluates",
            fix="--config FILE --args FILE --eval-rows N",
        )
    if command.epochs is not None:
        _refuse_below("--epochs", command.epochs, above=True)
    tokens = 0 if command.tokens is None else count_of(command.tokens)
    return cost.Work(tokens=tokens, rows=command.dataset_rows or 0, epochs=command.epochs or 1)


def inputs_of(command: PlanCommand, gpu: Gpu) -> cost.CostInputs:
    """The work, a GPU's price and the disk's speed, by the flags."""
    price = _price(command, gpu)
    if command.disk_speed is not None:
        _refuse_below("--disk-speed", command.disk_speed, above=True)
        if command.args is None:
            raise UsageError(
                "--disk-speed without --args",
                why="the script's arguments say when checkpoints are written",
                fix="--config FILE --args FILE --disk-speed 2",
            )
    return cost.CostInputs(
        work_of(command),
        price,
        disk_bytes_per_s=(command.disk_speed or 0) * 1e9,
        evaluation_rows=command.eval_rows or 0,
    )


def _refuse_below(flag: str, value: float, above: bool = False) -> None:
    """Raises unless a number is finite, and at least 0 or, with `above`, larger."""
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        bound = "above 0" if above else "0 or more"
        raise UsageError(f"{flag} {value:g}", why=f"it has to be a number, {bound}", fix=f"{flag} 2.5")


def _price(command: PlanCommand, gpu: Gpu) -> float | None:
    """The price of a GPU for an hour; None if unknown."""
    flag = "--price" if command.price is not None else "--prices" if command.prices is not None else ""
    if command.price is not None and command.prices is not None:
        raise UsageError("--price beside --prices", why="both say what a GPU costs", fix="leave out one of them")
    price = command.price if command.prices is None else price_for(read_prices(command.prices), gpu)
    if command.price is not None:
        _refuse_below("--price", command.price)
    if flag and (command.tokens, command.dataset_rows, command.args, command.compare) == (None,) * 4:
        raise UsageError(
            f"{flag} without --tokens", why="the amount of training is missing", fix=f"{flag} beside --tokens 2B"
        )
    return price


def price_for(prices: Prices, gpu: Gpu) -> float | None:
    """The price of a GPU by its name and size, else by its name with any size; None if unknown."""
    return prices.get((gpu.name, gpu.memory_gib), prices.get((gpu.name, None)))


def read_prices(path: Path) -> dict[tuple[str, float | None], float]:
    """The prices of a TOML by name and size of the GPU; the size is None if the file has none."""
    if sys.version_info >= (3, 11):  # here, as few plans have prices
        import tomllib
    else:
        import tomli as tomllib

    text = yaml_file.read_text(path, why="there are no prices", fix="a TOML file with a line such as H100 = 2.5")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"cannot read {path}: {error}",
            why="there are no prices",
            fix='a line for each GPU: H100 = 2.5, "A100-40GB" = 1.2, "RTX 4090" = 0.4',
        ) from error
    by_gpu: dict[tuple[str, float | None], float] = {}
    for name, price in content.items():
        _refuse_price(path, name, price)
        key = _gpu_of(path, name)
        if key in by_gpu:
            raise UsageError(
                f"{path}: {name} has a price already", why="one GPU has one price", fix="leave out one of the lines"
            )
        by_gpu[key] = float(price)
    return by_gpu


def _refuse_price(path: Path, name: str, price: object) -> None:
    is_number = isinstance(price, int | float) and not isinstance(price, bool)
    if not is_number or not math.isfinite(price) or price < 0:  # type: ignore[arg-type, operator]
        raise UsageError(
            f"{path}: {name} = {price!r} is not a price",
            why="it has to be a number, 0 or more: the price of one GPU for an hour",
            fix=f'"{name}" = 2.5',
        )


def _gpu_of(path: Path, name: str) -> tuple[str, float | None]:
    """The GPU that a key names, and its size if the key has one."""
    location = f"{path}:"
    machine, count = machines.parse(f"1x{name}", location)
    if machine.accelerator is None or (machine.count, count) != (1, 1):
        raise UsageError(
            f"{location} {name} is several GPUs",
            why="a price is for one GPU and one hour",
            fix=f"the name alone: {machine.accelerator} = 2.5",
        )
    try:
        gpu = gpus.find(machine.accelerator, machine.memory_gib)
    except UsageError as error:
        raise UsageError(f"{location} {error.what}", why="a price can't be like this", fix=error.fix) from error
    return gpu.name, machine.memory_gib
