from .command import examine as examine
from .flags import DoctorCommand as DoctorCommand
