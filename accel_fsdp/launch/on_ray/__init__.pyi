from .actor import shared_devices as shared_devices
from .driver import fit as fit
from .worker import run_rank as run_rank
