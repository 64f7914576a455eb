from . import rows as rows
from .rows import Rows as Rows
from .rows import cut as cut
from .shrink import SmallModel as SmallModel
from .shrink import shrink as shrink
from .small_config import Change as Change
