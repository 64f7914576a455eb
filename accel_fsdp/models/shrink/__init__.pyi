from . import fewer_layers as fewer_layers
from .small_config import Change as Change
from .small_model import SmallModel as SmallModel
from .small_model import shrink as shrink
from .small_model import small_version as small_version
