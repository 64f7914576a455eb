from . import by_name as by_name
from . import fit as fit
from . import model_shape as model_shape
from .cuda_emulation import Watch as Watch
from .recorder import Raw as Raw
from .recorder import Recorder as Recorder
from .recorder import record_run as record_run
