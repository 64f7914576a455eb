from . import layer_kinds as layer_kinds
from .small_config import Change as Change
from .small_model import SmallModel as SmallModel
from .small_model import shrink as shrink
