from . import janitor as janitor
from . import rows as rows
from . import scaled as scaled
from .command import rehearse as rehearse
from .flags import RehearseCommand as RehearseCommand
from .on_cpu import measured as measured
from .rows import Rows as Rows
from .rows import cut as cut
