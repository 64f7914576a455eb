from . import rows as rows
from .command import rehearse as rehearse
from .flags import RehearseCommand as RehearseCommand
from .rows import Rows as Rows
from .rows import cut as cut
from .shrink import SmallModel as SmallModel
from .shrink import shrink as shrink
from .small_config import Change as Change
