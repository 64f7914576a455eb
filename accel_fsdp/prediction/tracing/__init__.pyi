from . import by_name as by_name
from . import fit as fit
from . import model_shape as model_shape
from .cuda_emulation import Watch as Watch
from .recorder import Recorder as Recorder
from .run import RecordedRun as RecordedRun
from .run import record_run as record_run
