from .command import examine as examine
from .command import of_links as of_links
from .flags import DoctorCommand as DoctorCommand
