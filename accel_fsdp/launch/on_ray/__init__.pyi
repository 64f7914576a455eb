from .driver import fit as fit
from .meeting import shared_devices as shared_devices
from .worker import run_rank as run_rank
