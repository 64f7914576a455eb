from . import known_errors as known_errors
from .command import examine as examine
from .command import explain as explain
from .flags import DoctorCommand as DoctorCommand
