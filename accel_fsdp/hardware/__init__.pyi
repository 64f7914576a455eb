from . import gpus as gpus
from . import host as host
from . import machines as machines
from .gpus import GPUS as GPUS
from .gpus import Gpu as Gpu
from .gpus import find as find
from .gpus import is_hopper as is_hopper
from .machines import MachineFacts as MachineFacts
